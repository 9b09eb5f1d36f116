"""Enums of the contract, and what they stand for."""

from collections.abc import Mapping
from typing import Any, TypeVar

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.planning_options import Budget, Goal
from planner_service.simulator import Dispatch
from planner_service.simulator.felt import Objective
from services.domain.errors import invalid

_Value = TypeVar("_Value")

OBJECTIVES = {
    pb.OBJECTIVE_UNSPECIFIED: Objective.LARGEST_TIER,
    pb.OBJECTIVE_LARGEST_TIER: Objective.LARGEST_TIER,
    pb.OBJECTIVE_END_TO_END: Objective.END_TO_END,
    pb.OBJECTIVE_FIRST_TOKEN: Objective.FIRST_TOKEN,
    pb.OBJECTIVE_PACE: Objective.PACE,
}
GOALS = {
    pb.GOAL_UNSPECIFIED: None,
    pb.GOAL_LATENCY: Goal.LATENCY,
    pb.GOAL_QUALITY: Goal.QUALITY,
    pb.GOAL_COST: Goal.COST,
    pb.GOAL_RATE: Goal.RATE,
}
BUDGETS = {
    pb.GPU_BUDGET_UNSPECIFIED: Budget.AT_MOST,
    pb.GPU_BUDGET_AT_MOST: Budget.AT_MOST,
    pb.GPU_BUDGET_EXACT: Budget.EXACT,
}
DISPATCHES = {
    pb.DISPATCH_UNSPECIFIED: Dispatch.CAPACITY,
    pb.DISPATCH_CAPACITY: Dispatch.CAPACITY,
    pb.DISPATCH_ROUND_ROBIN: Dispatch.ROUND_ROBIN,
    pb.DISPATCH_PENDING_WORK: Dispatch.PENDING_WORK,
}
LENGTHS = {
    pb.LENGTH_SOURCE_UNSPECIFIED: "quality",
    pb.LENGTH_SOURCE_JUDGED: "quality",
    pb.LENGTH_SOURCE_TRACE: "trace",
}


def known(table: Mapping[Any, _Value], value: int, field: str) -> _Value:
    """What a value stands for. InvalidRequest naming the field for an unknown value."""
    if value not in table:
        raise invalid(field, f"unknown value {value}")
    return table[value]


def dispatch_from_proto(dispatch: pb.Dispatch.ValueType) -> Dispatch:
    return known(DISPATCHES, dispatch, "dispatch")
