"""Tokenizers, incremental decoding and stop strings."""
