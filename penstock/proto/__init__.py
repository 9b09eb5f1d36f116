"""Stubs generated from protos/penstock."""
