"""Models that read prompt and answer in one pass."""
