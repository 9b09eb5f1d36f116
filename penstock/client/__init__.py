"""The SDK. Imports the stubs and nothing else of Penstock."""
