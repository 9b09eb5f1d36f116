"""The chassis that every Penstock service stands on: domain vocabulary, runtime, settings, state, telemetry."""
