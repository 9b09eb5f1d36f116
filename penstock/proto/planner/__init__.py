"""Stubs generated from protos/penstock/planner."""
