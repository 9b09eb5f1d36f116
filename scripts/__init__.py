"""Maintenance scripts: stubs, settings page, dashboard, breaking changes."""
