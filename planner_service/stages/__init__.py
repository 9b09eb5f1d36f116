"""Length stages: from the lengths in flight to ranges and instance counts (CascadeInfer, section 4.2). Pure."""

from penstock.planner_service.stages.choice import check_bounds, choose
from penstock.planner_service.stages.partition import (
    Method,
    MoveCost,
    StagePlan,
    exponential_cuts,
    plan_stages,
    with_layout,
)
from penstock.planner_service.stages.profile import batches_of
from penstock.planner_service.stages.proposals import propose
from penstock.planner_service.stages.replay import ReplayVerdict, count_replayed, judge
from penstock.planner_service.stages.sample import LengthSample, count_in_flight, in_flight

__all__ = [
    "LengthSample",
    "Method",
    "MoveCost",
    "ReplayVerdict",
    "StagePlan",
    "batches_of",
    "check_bounds",
    "choose",
    "count_in_flight",
    "count_replayed",
    "exponential_cuts",
    "in_flight",
    "judge",
    "plan_stages",
    "propose",
    "with_layout",
]
