"""Stubs generated from protos/penstock/planner/v1."""
