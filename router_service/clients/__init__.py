"""Calls to workers and judges, with circuit breakers."""
