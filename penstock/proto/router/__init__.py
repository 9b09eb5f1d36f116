"""Stubs generated from protos/penstock/router."""
