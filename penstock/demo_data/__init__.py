"""The mesh of `penstock demo`: mesh file, shipped models, held-out prompts. Links here; files in a wheel of their own."""
