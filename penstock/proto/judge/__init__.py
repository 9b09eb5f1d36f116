"""Stubs generated from protos/penstock/judge."""
