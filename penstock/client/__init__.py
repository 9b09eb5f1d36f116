"""The SDK. Of Penstock it imports only the stubs."""
