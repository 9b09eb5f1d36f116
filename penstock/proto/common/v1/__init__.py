"""Stubs generated from protos/penstock/common/v1."""
