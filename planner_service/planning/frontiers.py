"""The best plans of all qualities: the least latency of each, and the least cost. No I/O."""

from collections.abc import Callable

import numpy as np

from penstock.planner_service.planning.cascade_plan import CascadePlan, dollars_per_hour
from penstock.planner_service.planning.deployers import deployer_for
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.routing.goals import cheapest, least_latency
from penstock.planner_service.routing.solution import Solution, Unreachable

Points = list[tuple[float, float]]
TRIED = 30  # routings of a large grid that are tried for one point


def frontiers(
    site: Site, demand: Demand, plan: CascadePlan, gpus: int | None, points: int, max_utilisation: float | None = None
) -> tuple[Points, Points]:
    """Of the best plans for `points` targets between the first tier's quality and the most, and of the plan itself.

    First (quality, latency of the slowest tier in seconds); then (quality, cost) of those whose slowest tier is as fast
    as the plan's, in dollars per hour where the GPUs have prices, else in GPUs. gpus, max_utilisation: see Options.
    """
    deployer, _ = deployer_for(site, demand, gpus=gpus, dispatch=plan.dispatch, max_utilisation=max_utilisation)
    targets = [float(target) for target in np.linspace(demand.judged.worst, demand.judged.most, points)]
    limit_s = plan.latency_p95_s * (1 + 1e-9)

    def cost(solution: Solution) -> float:
        dollars = dollars_per_hour(site, solution.deployment.strategies)
        return float(sum(solution.deployment.gpus)) if dollars is None else dollars

    fastest = _solved(targets, lambda q: least_latency(deployer, q, demand.judged, TRIED))
    leanest = _solved(targets, lambda q: cheapest(deployer, q, limit_s, demand.judged, TRIED))
    return (
        _best({(plan.quality, plan.latency_p95_s), *((s.quality, s.deployment.latency_s) for s in fastest)}),
        _best({(plan.quality, plan.cost), *((s.quality, cost(s)) for s in leanest)}),
    )


def _solved(targets: list[float], solve: Callable[[float], Solution]) -> list[Solution]:
    """One for each target that can be met. Targets are ascending: beyond the first that cannot, none can."""
    solutions = []
    for target in targets:
        try:
            solutions.append(solve(target))
        except Unreachable:
            break
    return solutions


def _best(plans: set[tuple[float, float]]) -> Points:
    """Those that no other beats in both."""
    return sorted(p for p in plans if not any(q[0] >= p[0] and q[1] <= p[1] and q != p for q in plans))
