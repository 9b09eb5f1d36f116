"""The clients' types as protobuf messages, and back; by subject. No I/O."""
