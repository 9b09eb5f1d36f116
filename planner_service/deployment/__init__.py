"""CASCADIA's deployment solver: parallelism search and GPU allocation."""
