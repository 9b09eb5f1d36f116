"""What a mesh file may hold: its parts by subject. `services.mesh_file` reads mesh files."""

from services.mesh_schema.access import MeshAccess, MeshTenant, MeshTls
from services.mesh_schema.common import DEFAULT_KV_TOKENS, DEFAULT_STEP_TOKENS, MAX_PORT, MAX_PROCESSES, Device
from services.mesh_schema.judge import MeshJudge, MeshScorer
from services.mesh_schema.mesh import MeshFile
from services.mesh_schema.planner import MeshPlanner, MeshReplan
from services.mesh_schema.router import MAX_ROUTER_PROCESSES, MeshPromptSamples, MeshRouter, processes_problem
from services.mesh_schema.slo import MeshSlo, MeshSloClass, MeshSloPhase
from services.mesh_schema.stages import MeshStages
from services.mesh_schema.tiers import (
    MAX_DRAFT_WINDOW,
    MeshEarlyCheck,
    MeshLongAnswers,
    MeshSpeculation,
    MeshTier,
    RemoteMeshEngine,
    SglangMeshEngine,
    SimulatedMeshEngine,
)

__all__ = [
    "DEFAULT_KV_TOKENS",
    "DEFAULT_STEP_TOKENS",
    "MAX_DRAFT_WINDOW",
    "MAX_PORT",
    "MAX_PROCESSES",
    "MAX_ROUTER_PROCESSES",
    "Device",
    "MeshAccess",
    "MeshEarlyCheck",
    "MeshFile",
    "MeshJudge",
    "MeshLongAnswers",
    "MeshPlanner",
    "MeshPromptSamples",
    "MeshReplan",
    "MeshRouter",
    "MeshScorer",
    "MeshSlo",
    "MeshSloClass",
    "MeshSloPhase",
    "MeshSpeculation",
    "MeshStages",
    "MeshTenant",
    "MeshTier",
    "MeshTls",
    "RemoteMeshEngine",
    "SglangMeshEngine",
    "SimulatedMeshEngine",
    "processes_problem",
]
