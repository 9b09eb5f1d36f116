"""The state of the mesh in Redis: instances and their load, plans, recent traces and sampled requests.

All of it can be rebuilt by the processes that wrote it.
"""

from services.state.connection import StateUnavailable, connect
from services.state.feed import MeshFeed
from services.state.instances import InstanceStore
from services.state.plans import KEPT_REVISIONS, PlanStore
from services.state.prompt_samples import PromptSampleStore
from services.state.registry import Registrar
from services.state.served_requests import ServedRequestStore
from services.state.traces import SpanRecord, TraceStore
from services.state.workload import WorkloadStore

__all__ = [
    "KEPT_REVISIONS",
    "InstanceStore",
    "MeshFeed",
    "PlanStore",
    "PromptSampleStore",
    "Registrar",
    "ServedRequestStore",
    "SpanRecord",
    "StateUnavailable",
    "TraceStore",
    "WorkloadStore",
    "connect",
]
