"""Engines behind one interface."""
