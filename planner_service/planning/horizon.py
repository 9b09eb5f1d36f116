"""How long a stretch of the trace a plan is made for, and the other stretches it is run on. No I/O.

A plan for a stretch that is over before the first request is answered is a plan for a burst. So the stretch lasts
several latencies: guessed before there is a plan, and lengthened once where the plan turns out slower.
"""

import contextlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.planning.deployers import deployer_for
from penstock.planner_service.planning.largest_alone import largest_alone
from penstock.planner_service.question.demand import continued, demand_of
from penstock.planner_service.question.planning_options import LEAST_REQUESTS, Goal, Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import Workload
from penstock.types.planning import Objective

LATENCIES = 20.0
"""That a stretch lasts: what is served while the first requests find the tiers empty is a twentieth of it."""
ENOUGH_LATENCIES = 10.0  # a plan whose stretch lasts fewer is made again
LOADED = 1.2  # times the latency of a request alone: the guess before there is a plan
OF_FEW = 1.4  # times the limit that few requests have, whose queues are short
LONGER = 1.05  # times the latency that is known, of a longer stretch
USUAL_REQUESTS = 500  # fewest, where the trace has them
MOST_REQUESTS, MOST_OF_CHEAPEST = 6000, 60_000  # a cheapest plan is found with few simulations
MOST_RUN = 3_000_000  # requests of all other stretches, for memory's sake: fewer stretches where they are long

Plan = Callable[[Demand, Sequence[Demand]], CascadePlan]


def plan_over_horizon(
    plan: Plan, site: Site, trace: Workload, judged: JudgedSample, options: Options
) -> tuple[CascadePlan, Demand]:
    """(the plan, what it was made for): of options.requests, or of as many as the plan needs; see demand_of.

    options.runs: other stretches, from places and with prompts drawn by the seeds after `seed`. These last LATENCIES though
    the search may be over fewer requests: over half for a cheapest plan, as its simulations take most of the time.

    Raises:
        InvalidRequest, Unreachable: see demand_of and plan_cascade.
    """
    trace = trace.uncached() if options.ignore_cached else trace

    def drawn(count: int, nth: int) -> Demand:
        source = trace if options.requests is not None else continued(trace, count)
        return demand_of(
            source, judged, requests=count, seed=options.seed + nth, lengths=options.lengths, rate=options.rate
        )

    def planned(searched: int, of_run: int) -> tuple[CascadePlan, Demand]:
        demand, runs = drawn(searched, 0), min(options.runs, max(1, MOST_RUN // of_run))
        return plan(demand, [drawn(of_run, nth + 1) for nth in range(runs)]), demand

    if options.requests is not None:
        return planned(options.requests, options.requests)
    short, cheapest = min(len(trace), USUAL_REQUESTS), options.aim is Goal.COST
    most = MOST_OF_CHEAPEST if cheapest else MOST_REQUESTS

    def counts(latency_s: float, demand: Demand) -> tuple[int, int]:
        """Requests that the search is over, and of each other stretch."""
        enough = min(MOST_RUN, max(short, _requests_for(latency_s, demand)))
        searched = max(short, enough // 2) if cheapest and options.runs else enough
        return min(most, searched), enough if options.runs else searched

    sample = drawn(short, 0)
    first = counts(_guessed_s(site, sample, options) if short >= LEAST_REQUESTS else 0.0, sample)
    best, demand = planned(*first)
    again = counts(LONGER * best.stay_s, demand)
    if max(demand.seconds, best.runs_s) < ENOUGH_LATENCIES * best.stay_s and max(again) > max(first):
        return planned(*again)
    return best, demand


def _requests_for(latency_s: float, demand: Demand) -> int:
    return 0 if demand.rate_per_s is None else math.ceil(LATENCIES * latency_s * demand.rate_per_s)


def _guessed_s(site: Site, demand: Demand, options: Options) -> float:
    """How long requests stay, before there is a plan. The cheapest plan takes about as long as it may."""
    if options.aim is Goal.COST and options.objective is Objective.END_TO_END:
        with contextlib.suppress(Unreachable):
            return min(options.max_latency_s or math.inf, OF_FEW * largest_alone(site, demand, options, ()).limit_s)
    return LOADED * _alone_s(site, demand)


def _alone_s(site: Site, demand: Demand) -> float:
    """p95 of a request alone on the fastest replica, at the slowest tier that can run at all."""
    deployer, _ = deployer_for(site, demand, gpus=None)
    tiers = [np.percentile(alone, deployer.percentile) for alone in deployer.alone_s() if np.isfinite(alone).all()]
    return float(max(tiers, default=0.0))
