"""Stubs generated from protos/penstock/worker/v1."""
