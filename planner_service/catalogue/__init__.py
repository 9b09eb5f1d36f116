"""Data sheets of common GPUs and shapes of common models, with their sources."""
