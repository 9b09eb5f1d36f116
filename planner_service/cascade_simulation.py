"""A whole cascade in virtual time: tier by tier, with what escalates and judging in between. No I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner_service.deployment.search import Strategy
from planner_service.routing.quality import route
from planner_service.simulator import Dispatch, Report, Served, Workload, report, serve
from planner_service.simulator.workload import Floats, Ints
from planner_service.site import Demand, Site
from services.domain.errors import invalid


@dataclass(frozen=True, slots=True, eq=False)
class TierRun:
    """N requests as one tier served them. request (N): their places in the demand. done_s (N): when they were judged."""

    request: Ints
    work: Workload
    served: Served
    done_s: Floats


def simulate_cascade(
    site: Site, demand: Demand, thresholds: Sequence[float], strategies: Sequence[Strategy], dispatch: Dispatch
) -> tuple[list[Report], Floats]:
    """(each tier's report, (N) seconds from a request's arrival to its final answer).

    Raises:
        InvalidRequest: requests reach a tier that has no GPUs.
    """
    done, reports = np.zeros(len(demand.requests)), []
    for run in tier_runs(site, demand, thresholds, strategies, dispatch):
        done[run.request] = run.done_s
        reports.append(report(run.work, run.served))
    return reports, done - demand.arrival_s


def tier_runs(
    site: Site, demand: Demand, thresholds: Sequence[float], strategies: Sequence[Strategy], dispatch: Dispatch
) -> Iterator[TierRun]:
    """Tier after tier, the requests that reach it. Errors as in `simulate_cascade`."""
    requests = demand.requests
    processed = route(requests, thresholds).processed
    at = demand.arrival_s.copy()  # when each request reaches the tier at hand
    for tier, strategy in enumerate(strategies):
        chosen = np.flatnonzero(processed[tier])
        order = chosen[np.argsort(at[chosen], kind="stable")]
        work = Workload(at[order], requests.input_tokens[order], requests.output_tokens[order, tier])
        replicas = [replica for replica, count in strategy.replicas for _ in range(count)]
        if len(work) and not replicas:
            raise invalid("thresholds", f"{len(work)} requests reach tier {site.tiers[tier]}, which has no GPUs")
        served = serve(work, replicas, dispatch)
        judged_s = site.judge_s if tier < len(strategies) - 1 else 0.0
        at[order] = served.finish_s + judged_s
        yield TierRun(order, work, served, at[order])
