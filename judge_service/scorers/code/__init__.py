"""Programs that are run with tests."""
