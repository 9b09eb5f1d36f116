"""Runs code that models wrote, in a sandbox."""
