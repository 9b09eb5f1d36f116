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
LONGER = 1.1  # times the latency that is known, of a longer stretch
USUAL_REQUESTS = 500  # fewest, where the trace has them
MOST_REQUESTS = 6000
CHEAPEST_REQUESTS, CHEAPEST_PER_GPU, MOST_OF_CHEAPEST = 40_000, 60, 100_000
"""The most for a cheapest plan, which is found with few simulations: more where the rate is as high as so many GPUs carry."""
MOST_RUN = 3_000_000  # requests of all other stretches, for memory's sake: fewer stretches where they are long

Plan = Callable[[Demand, Sequence[Demand]], CascadePlan]


def plan_over_horizon(
    plan: Plan, site: Site, trace: Workload, judged: JudgedSample, options: Options
) -> tuple[CascadePlan, Demand]:
    """(the plan, what it was made for): of options.requests, or of as many as the plan needs; see demand_of.

    options.runs: other stretches, from places and with prompts drawn by the seeds after `seed`; of LATENCIES where a search
    over as many requests would take too long.

    Raises:
        InvalidRequest, Unreachable: see demand_of and plan_cascade.
    """
    trace = trace.uncached() if options.ignore_cached else trace

    def drawn(count: int, nth: int) -> Demand:
        source = trace if options.requests is not None else continued(trace, count)
        return demand_of(
            source, judged, requests=count, seed=options.seed + nth, lengths=options.lengths, rate=options.rate
        )

    def planned(enough: int, most: int) -> tuple[CascadePlan, Demand]:
        demand, runs = drawn(min(enough, most), 0), min(options.runs, max(1, MOST_RUN // enough))
        return plan(demand, [drawn(min(enough, MOST_RUN), nth + 1) for nth in range(runs)]), demand

    if options.requests is not None:
        return planned(options.requests, options.requests)
    most = MOST_REQUESTS
    if options.aim is Goal.COST:
        most = min(MOST_OF_CHEAPEST, max(CHEAPEST_REQUESTS, CHEAPEST_PER_GPU * (options.gpus or site.gpus)))
    enough = short = min(len(trace), USUAL_REQUESTS)
    if short >= LEAST_REQUESTS:
        sample = drawn(short, 0)
        enough = max(short, _requests_for(_guessed_s(site, sample, options), sample))
    best = planned(enough, most)
    again = min(MOST_RUN if options.runs else most, _requests_for(LONGER * best[0].stay_s, best[1]))
    if max(best[1].seconds, best[0].runs_s) < ENOUGH_LATENCIES * best[0].stay_s and again > enough:
        best = planned(again, most)
    return best


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
