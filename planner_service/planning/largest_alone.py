"""The largest model alone, which a cascade has to be worth: what the default question keeps to. No I/O.

With a least quality alone, a user wants it for the least cost, at a latency like that of the model the cascade replaces. So
that latency is the one of the largest model alone on the fewest GPUs that sustain the rate: a plan may take KEPT times it.
"""

import dataclasses
from collections.abc import Sequence

from penstock.planner_service.planning.cascade_plan import CascadePlan, outcome, with_runs
from penstock.planner_service.planning.one_plan import PlanSearch
from penstock.planner_service.question.planning_options import Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.routing.goals import cheapest
from penstock.planner_service.routing.solution import Unreachable
from penstock.types.planned import Cost, LargestAlone

KEPT = 1.2
DOUBLINGS = 12  # of the cluster, until the model is given up
ANY_S = 1e9  # a latency that every one is under


def largest_alone(site: Site, demand: Demand, options: Options, runs: Sequence[Demand]) -> LargestAlone:
    """The last tier that can serve all requests, within max_utilisation; on a larger cluster where this one is too small.

    Raises:
        Unreachable: None can, on a cluster of any size.
    """
    reasons = []
    for tier in reversed(range(len(site.tiers))):
        only = [tier]
        try:
            plan = _alone(site.only(only), demand.only(only), options, [run.only(only) for run in runs])
        except Unreachable as error:
            reasons.append(f"{site.tiers[tier]}: {error}")
            continue
        mean = plan.felt_interval.mean if plan.felt_interval is not None else 0.0
        seconds, allowed = max(plan.felt_s, mean), options.gpus or site.gpus
        cost = Cost(plan.gpus, plan.dollars_per_hour)
        name = site.tiers[tier]
        return LargestAlone(name, plan.quality, seconds, KEPT * seconds, cost, assumed=plan.gpus > allowed)
    raise Unreachable(f"no model serves the requests alone ({'; '.join(reasons)})", 0.0)


def _alone(site: Site, demand: Demand, options: Options, runs: Sequence[Demand]) -> CascadePlan:
    """The cheapest plan of a site of one tier that sustains the rate."""
    bounded = dataclasses.replace(options, gpus=None, allow_overload=False)
    for _ in range(DOUBLINGS):
        deployer, unfit = PlanSearch(site, bounded).deployer(demand)
        try:
            if not unfit:
                solution = cheapest(deployer, 0.0, ANY_S)
                return with_runs(site, outcome(site, demand, solution, deployer, unfit), runs)
        except Unreachable:
            if site.remotes:  # more GPUs do not help
                raise
        site = _doubled(site)
    raise Unreachable("; ".join(unfit.values()) or f"{site.gpus} GPUs are too few", 0.0)


def _doubled(site: Site) -> Site:
    """The same site with twice the nodes of each type."""
    first, *more = (dataclasses.replace(kind, nodes=2 * kind.nodes) for kind in site.types)
    return dataclasses.replace(site, cluster=first, more=tuple(more))
