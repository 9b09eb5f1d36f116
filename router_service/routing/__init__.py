"""Choice of the instance: placement, ejection, prefix affinity, active health checks."""
