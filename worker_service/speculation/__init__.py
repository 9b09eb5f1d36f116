"""Speculative decoding: acceptance of draft tokens."""
