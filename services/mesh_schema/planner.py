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
    as `skip`, stay as the plan in force has them; a plan with rules is made again for up to three tiers."""
    window_s: float = Field(default=300.0, gt=0)
    """Length of the windows in which requests are sampled and compared."""
    sample: int = Field(default=50, ge=1)
    """Requests that each router samples per window."""


class MeshScaling(BaseModel):
    """Counts of workers between plans, by live load."""

    model_config = FROZEN

    enabled: bool = False
    """Whether tiers have more or fewer workers than their plan says, as their load needs: `penstock up` starts and stops
    them, autoscalers follow `penstock_desired_replicas`. Not for tiers with length stages, or workers of several shapes.
    A tier that the plan has no workers of gets one when a request waits for it, and none after `hold_s` without requests."""
    busy: float = Field(default=0.8, gt=0, le=1)
    """The share of its `max_running` places that a worker should use, and of the tightest time to the first token of
    `slo.classes` that requests should wait."""
    rise_s: float = Field(default=15.0, ge=1, le=3600)
    """A tier gets more workers once it has needed them for so long."""
    hold_s: float = Field(default=300.0, ge=1, le=3600)
    """It gets fewer once it has needed no more for so long."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs that the workers of all tiers may have together. None: as many as the plan gives them, so that they move to the
    tiers that need them."""


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
    scaling: MeshScaling = MeshScaling()
    """More or fewer workers than the plan has, by live load: see below."""
