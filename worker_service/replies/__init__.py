"""Serves replies: their events, tokens in columns, heartbeats, and many of them over one call."""
