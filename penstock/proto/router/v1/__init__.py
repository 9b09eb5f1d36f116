"""Stubs generated from protos/penstock/router/v1."""
