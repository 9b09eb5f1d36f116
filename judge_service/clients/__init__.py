"""Calls of judges to others."""
