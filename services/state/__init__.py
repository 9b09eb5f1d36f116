"""What the mesh keeps in Redis: who is there, how loaded they are, which plan holds, the last traces and sampled requests.

Everything here can be rebuilt by those who wrote it; nothing else is kept.
"""

from services.state.connection import StateUnavailable, connect
from services.state.feed import MeshFeed
from services.state.plans import KEPT_REVISIONS, PlanStore
from services.state.registry import Registrar
from services.state.traces import SpanRecord, TraceStore
from services.state.workload import WorkloadStore

__all__ = [
    "KEPT_REVISIONS",
    "MeshFeed",
    "PlanStore",
    "Registrar",
    "SpanRecord",
    "StateUnavailable",
    "TraceStore",
    "WorkloadStore",
    "connect",
]
