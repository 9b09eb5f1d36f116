"""What a plan keeps where step times are estimated, and the estimate is too short or too long. No I/O.

A plan is made for what a roofline says, and its figures are those. Its latency is simulated with all estimated step times as
short and as long as published ones have been, too. Where a stated latency is not kept at the slow end, a cheapest plan is
looked for that keeps it there: it is taken if it costs no more, and else said, as the target is the user's to give up.
"""

import dataclasses
from collections.abc import Callable

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.planning.one_plan import MARGIN
from penstock.planner_service.planning.plan_cascade import chosen_of
from penstock.planner_service.question.planning_options import Goal, Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.question.step_times import is_estimated
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.grid import EPSILON
from penstock.planner_service.routing.solution import Unreachable
from penstock.types.planned import Cost, LatencyBand

TRIES = 2  # plans for less latency, to keep the target at the slow end

PlanOfDemand = tuple[CascadePlan, Demand]


def over_band(
    planned: PlanOfDemand,
    options: Options,
    again: Callable[[Options], PlanOfDemand],
    band_of: Callable[[CascadePlan, Demand], LatencyBand | None],
) -> tuple[PlanOfDemand, LatencyBand | None]:
    """(the plan with the demand that it was made for, its latency over the band of estimated step times, if there are any).

    again: plans for other options. band_of: see `latency_band`.
    """
    band, limit_s = band_of(*planned), options.max_latency_s
    if band is None or limit_s is None or band.slow_s <= limit_s:
        return planned, band
    band = dataclasses.replace(band, missed=True)
    within_s, slow_s, felt_s = limit_s, band.slow_s, planned[0].felt_s
    for _ in range(TRIES if options.aim is Goal.COST else 0):
        within_s = min(within_s, felt_s) * MARGIN * limit_s / slow_s
        try:
            other = again(dataclasses.replace(options, max_latency_s=within_s))
        except Unreachable:
            break
        others = band_of(*other)
        if others is None or others.slow_s <= limit_s:
            if other[0].cost <= planned[0].cost + EPSILON:
                return other, others
            return planned, dataclasses.replace(band, kept_for=Cost(other[0].gpus, other[0].dollars_per_hour))
        slow_s, felt_s = others.slow_s, other[0].felt_s
    return planned, band


def latency_band(site: Site, plan: CascadePlan, demand: Demand) -> LatencyBand | None:
    """The plan's latency at both ends; None where it has no estimated step times. site, demand: of all tiers."""
    site, demand = chosen_of(plan, site, demand)
    estimated = [is_estimated(site, i) and tier.strategy.used for i, tier in enumerate(plan.tiers)]
    engine = site.runtime.engine
    if not any(estimated) or engine.fast == engine.slow:
        return None
    demand = demand.under(plan.rules)
    if plan.rate_per_s is not None and demand.rate_per_s is not None:  # of the goal rate, its own
        demand = demand.scaled(plan.rate_per_s / demand.rate_per_s)

    def latency_s(factor: float) -> float:
        strategies = [
            _scaled(tier.strategy, factor) if scales else tier.strategy
            for tier, scales in zip(plan.tiers, estimated, strict=True)
        ]
        run = run_cascade(site, demand, plan.thresholds, strategies, plan.dispatch)
        return run.latency_s(plan.objective, plan.percentile)

    return LatencyBand(latency_s(engine.fast), latency_s(engine.slow))


def _scaled(strategy: Strategy, factor: float) -> Strategy:
    """The strategy with all step times of its replicas times a factor."""
    replicas = tuple((dataclasses.replace(r, latency=r.latency.scaled(factor)), n) for r, n in strategy.replicas)
    return dataclasses.replace(strategy, replicas=replicas)
