"""Speculative decoding. Pure parts: which draft tokens stand."""
