"""Stubs generated from protos/penstock/worker."""
