"""The scorers, each an entry point of `penstock.scorers`."""
