"""An engine and a scorer of another package."""
