"""Calls to workers and judges, and what guards them."""
