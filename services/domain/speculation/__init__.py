"""Speculative decoding: what drafts cost, how far they are accepted, and which models draft. No I/O."""
