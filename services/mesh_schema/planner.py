"""What a mesh file says of the planner."""

from typing import Literal

from pydantic import BaseModel, Field

from penstock.services.mesh_schema.common import FROZEN, MAX_PROCESSES
from penstock.types.rules import PlanRules


class MeshReplan(BaseModel):
    """Detection of workload drift, and planning again. A relative path is resolved against the mesh file's folder."""

    model_config = FROZEN

    enabled: bool = False
    """Routers sample finished requests (lengths and scores, no text), and the planner compares them with its plan. Needs a
    question."""
    question: str = ""
    """Question file of `penstock plan`: hardware, models with the same tiers as this file, the pattern of arrivals, which is
    scaled to the measured rate, judged prompts, which supply the values that sampled requests lack, and targets. Rules, such
    as `skip`, stay as the plan in force has them."""
    window_s: float = Field(default=300.0, gt=0)
    """Length of the windows in which requests are sampled and compared."""
    sample: int = Field(default=50, ge=1)
    """Requests that each router samples per window."""
    rate_change: float = Field(default=0.3, gt=0)
    """A relative change of the request rate by this much counts as drift, unless noise explains it."""
    length_change: float = Field(default=0.3, gt=0)
    """The same for token counts."""
    score_change: float = Field(default=6.0, gt=0)
    """The same for mean scores, in points."""
    confirm_windows: int = Field(default=2, ge=1)
    """Consecutive windows that must show a change before it counts as drift."""
    cooldown_windows: int = Field(default=2, ge=0)
    """Windows after planning again in which nothing counts as drift."""


class MeshPlanner(BaseModel, PlanRules, frozen=True):
    """The planner."""

    model_config = FROZEN

    replicas: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Planner processes."""
    judge_unavailable: Literal["escalate", "accept"] = "escalate"
    """What routers do with answers that cannot be scored: escalate to the last tier, or accept them."""
    max_instances: int = Field(default=64, ge=1)
    """Largest number of instances of a tier in a plan, unless this file itself has more."""
    replan: MeshReplan = MeshReplan()
    """Planning again when the workload drifts: see below."""
