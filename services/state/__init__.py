"""The state of the mesh in Redis: instances and their load, plans, recent traces and sampled requests.

All of it can be rebuilt by the processes that wrote it.
"""

from penstock.services.state.connection import StateUnavailable, connect
from penstock.services.state.feed import MeshFeed
from penstock.services.state.instances import InstanceStore
from penstock.services.state.leadership import Leadership
from penstock.services.state.plans import KEPT_REVISIONS, PlanStore
from penstock.services.state.prompt_samples import PromptSampleStore
from penstock.services.state.registry import Registrar
from penstock.services.state.served_requests import ServedRequestStore
from penstock.services.state.traces import SpanRecord, TraceStore
from penstock.services.state.workload import WorkloadStore

__all__ = [
    "KEPT_REVISIONS",
    "InstanceStore",
    "Leadership",
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
