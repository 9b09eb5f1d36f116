"""Latency promises: what is promised, whether it was kept, which requests are admitted. Pure Python, no I/O.

Importing this package loads neither numpy nor numba, which routers do not have. The compiled scheduler, for workers and the
planner, is in `services.domain.slo.compiled` and is imported by name.
"""
