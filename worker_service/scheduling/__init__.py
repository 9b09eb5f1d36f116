"""Scheduling of steps: sequences, KV blocks, batches. Pure: no I/O, no torch, no clock."""
