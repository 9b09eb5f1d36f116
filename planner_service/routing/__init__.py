"""CASCADIA's routing solver: thresholds from per-request scores, and the bi-level search over thresholds and deployment."""
