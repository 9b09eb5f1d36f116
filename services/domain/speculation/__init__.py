"""Speculative decoding: what drafts cost, how far they stand, and which models draft. No I/O."""
