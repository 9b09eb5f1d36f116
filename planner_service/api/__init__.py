"""What commands, the service and planning again call: each thing is done in one way."""

from penstock.planner_service.api.deployments import manifests, planned_values
from penstock.planner_service.api.plans import Planned, plan, plan_for, sweep
from penstock.planner_service.api.simulations import (
    deployment_of,
    planned_site,
    shapes_of,
    simulate,
    simulate_on,
    simulate_plan,
    strategies_of,
)
from penstock.planner_service.api.slos import capacity
from penstock.planner_service.api.stages import Stages, at_rate, stages

__all__ = [
    "Planned",
    "Stages",
    "at_rate",
    "capacity",
    "deployment_of",
    "manifests",
    "plan",
    "plan_for",
    "planned_site",
    "planned_values",
    "shapes_of",
    "simulate",
    "simulate_on",
    "simulate_plan",
    "stages",
    "strategies_of",
    "sweep",
]
