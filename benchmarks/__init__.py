"""Benchmarks for the figures in README and docs. Each writes JSON with data, seed and machine."""
