"""Which instance serves: placement, ejection, prefix affinity, active health checks."""
