"""The base of all Penstock services: domain types, runtime, settings, state, telemetry."""
