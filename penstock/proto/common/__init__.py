"""Stubs generated from protos/penstock/common."""
