"""A whole cascade in virtual time: tier by tier, with what escalates and judging in between. No I/O."""

from collections.abc import Sequence

import numpy as np

from planner_service.deployment.search import Strategy
from planner_service.routing.quality import route
from planner_service.simulator import Dispatch, Report, Workload, report, serve
from planner_service.simulator.workload import Bools, Floats
from planner_service.site import Demand, Site
from services.domain.errors import invalid


def simulate_cascade(
    site: Site, demand: Demand, thresholds: Sequence[float], strategies: Sequence[Strategy], dispatch: Dispatch
) -> tuple[list[Report], Floats]:
    """(each tier's report, (N) seconds from a request's arrival to its final answer).

    Raises:
        InvalidRequest: requests reach a tier that has no GPUs.
    """
    return simulate_routed(site, demand, route(demand.requests, thresholds).processed, strategies, dispatch)


def simulate_routed(
    site: Site, demand: Demand, processed: Bools, strategies: Sequence[Strategy], dispatch: Dispatch
) -> tuple[list[Report], Floats]:
    """As `simulate_cascade`. processed (C, N): the requests that reach each tier."""
    requests = demand.requests
    at = demand.arrival_s.copy()  # when each request reaches the tier at hand
    done = np.zeros(len(requests))
    reports = []
    for tier, strategy in enumerate(strategies):
        chosen = np.flatnonzero(processed[tier])
        order = chosen[np.argsort(at[chosen], kind="stable")]
        work = Workload(at[order], requests.input_tokens[order], requests.output_tokens[order, tier])
        replicas = [replica for replica, count in strategy.replicas for _ in range(count)]
        if len(work) and not replicas:
            raise invalid("thresholds", f"{len(work)} requests reach tier {site.tiers[tier]}, which has no GPUs")
        served = serve(work, replicas, dispatch)
        judged_s = site.judge_s if tier < len(strategies) - 1 else 0.0
        at[order] = done[order] = served.finish_s + judged_s
        reports.append(report(work, served))
    return reports, done - demand.arrival_s
