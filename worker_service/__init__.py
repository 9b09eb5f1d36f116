"""The worker service: one engine that serves one model of one tier."""
