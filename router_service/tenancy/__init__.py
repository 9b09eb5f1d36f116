"""Who sends a request, what it may ask for, and what it has used."""
