"""What a mesh file says of the planner."""

from typing import Literal

from pydantic import BaseModel, Field

from services.mesh_schema.common import FROZEN, MAX_PROCESSES


class MeshReplan(BaseModel):
    """Detection of workload drift, and planning again. The files are those of `penstock plan`; relative paths are resolved
    against the mesh file's folder."""

    model_config = FROZEN

    enabled: bool = False
    """Routers sample finished requests (lengths and scores, no text), and the planner compares them with its plan. Needs the
    files below."""
    cluster: str = ""
    """Cluster file: the hardware that a plan may use."""
    models: str = ""
    """Models file; it has the same tiers as this file."""
    trace: str = ""
    """Trace file: the pattern of arrivals, scaled to the measured rate."""
    quality: str = ""
    """Judged prompts: they supply the values that sampled requests lack, such as scores of tiers they did not reach."""
    min_quality: float | None = Field(default=None, ge=0, le=100)
    """Plan for the lowest latency with at least this mean score; set either this or max_latency_s."""
    max_latency_s: float | None = Field(default=None, gt=0)
    """Plan for the highest quality with at most this p95 latency of the slowest tier."""
    gpus: int | None = Field(default=None, ge=1)
    """GPUs to use at most. None: all of the cluster."""
    requests: int = Field(default=500, ge=20)
    """Requests to plan for, or all of the trace if it has fewer. A p95 needs 20."""
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


class MeshPlanner(BaseModel):
    """The planner."""

    model_config = FROZEN

    replicas: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Planner processes."""
    judge_unavailable: Literal["escalate", "accept"] = "escalate"
    """What routers do with answers that cannot be scored: escalate to the last tier, or accept them."""
    best_answer: bool = False
    """Routers deliver the answer with the highest score of those that a request has got, instead of always the last one. The
    last tier's answer is held and judged, too, where there is an earlier one to compare it with."""
    max_instances: int = Field(default=64, ge=1)
    """Largest number of instances of a tier in a plan, unless this file itself has more."""
    replan: MeshReplan = MeshReplan()
    """Planning again when the workload drifts: see below."""
