"""What a mesh file may hold: its parts by subject. `services.mesh_file` reads mesh files."""

from penstock.services.mesh_schema.access import MeshAccess, MeshTenant, MeshTls
from penstock.services.mesh_schema.common import DEFAULT_KV_TOKENS, DEFAULT_STEP_TOKENS, MAX_PORT, MAX_PROCESSES, Device
from penstock.services.mesh_schema.judge import WITHOUT_LOGPROBS, MeshJudge, MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.planner import MeshPlanner, MeshReplan, MeshScaling
from penstock.services.mesh_schema.router import MAX_ROUTER_PROCESSES, MeshPromptSamples, MeshRouter, processes_problem
from penstock.services.mesh_schema.slo import MeshSlo, MeshSloClass, MeshSloPhase
from penstock.services.mesh_schema.stages import MeshStages
from penstock.services.mesh_schema.tiers import (
    MAX_DRAFT_WINDOW,
    MeshSpeculation,
    MeshTier,
)

__all__ = [
    "DEFAULT_KV_TOKENS",
    "DEFAULT_STEP_TOKENS",
    "MAX_DRAFT_WINDOW",
    "MAX_PORT",
    "MAX_PROCESSES",
    "MAX_ROUTER_PROCESSES",
    "WITHOUT_LOGPROBS",
    "Device",
    "MeshAccess",
    "MeshFile",
    "MeshJudge",
    "MeshPlanner",
    "MeshPromptSamples",
    "MeshReplan",
    "MeshRouter",
    "MeshScaling",
    "MeshScorer",
    "MeshSlo",
    "MeshSloClass",
    "MeshSloPhase",
    "MeshSpeculation",
    "MeshStages",
    "MeshTenant",
    "MeshTier",
    "MeshTls",
    "processes_problem",
]
