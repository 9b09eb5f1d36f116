"""Engines: one interface, several makes."""
