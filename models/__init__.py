"""The shipped model family and the scripts that made it."""
