"""The worker service: an engine that serves the model of a tier."""
