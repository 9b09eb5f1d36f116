"""Stubs generated from protos/penstock/judge/v1."""
