"""Whether a deployment keeps up with the rate that it is planned for, and at which rate it breaks. No I/O.

A plan is made for a stretch of requests. Where they come faster than they are served, their latency says how long that
stretch is, and nothing about requests that keep coming: each waits longer than the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.deployment.saturation import saturated_per_s, together_per_s
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.routing.grading import Grading
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.routing.tier_traffic import TierTraffic
from penstock.planner_service.simulator import Dispatch, Workload
from penstock.planner_service.simulator.workload import Bools, Floats

JUDGE = "the judge"


@dataclass(frozen=True, slots=True)
class SustainedLoad:
    """offered_per_s: arrivals per second. sustained_per_s: the rate at which it breaks, which `tier` limits, or JUDGE.

    utilisation: by tier, the share of what it sustains that is offered to it; 0 for a tier without requests.
    """

    offered_per_s: float
    sustained_per_s: float
    tier: str
    utilisation: tuple[float, ...] = ()

    @property
    def overloaded(self) -> bool:
        return self.offered_per_s > self.sustained_per_s

    def __str__(self) -> str:
        if not self.overloaded:
            share = self.sustained_per_s / self.offered_per_s
            return (
                f"{self.tier} breaks first, at {rate_text(self.sustained_per_s)} requests/s, {share:.2f} times the rate"
            )
        return (
            f"overloaded: {rate_text(self.offered_per_s)} requests/s are offered, and {self.tier} keeps up with "
            f"{rate_text(self.sustained_per_s)}: requests that keep coming wait longer and longer"
        )


def sustained_load(
    requests: JudgedSample,
    arrival_s: Floats,
    processed: Bools,
    strategies: Sequence[Strategy],
    dispatch: Dispatch = Dispatch.CAPACITY,
    grading: Grading | None = None,
) -> SustainedLoad | None:
    """What each tier sustains of the requests that reach it, by simulation; the deployment sustains the least of all tiers.

    requests: one per arrival of `arrival_s` (N, ascending). processed (C, N): those that reach each tier. grading: what
    grades answers as a load, which counts at the tier that grades; None where that loads nothing.

    None where arrivals have no rate, as they come all at once, or where only remote tiers without limits serve.
    """
    traffic = TierTraffic(requests, arrival_s, grading)
    offered_per_s = traffic.rate_per_s
    if not 0 < offered_per_s < np.inf:
        return None
    limits: list[tuple[float, str]] = []
    utilisation = []
    for tier, strategy in enumerate(strategies):
        answers, drafts = traffic.answers(tier, processed), requests.draft_tokens(tier, processed)
        work = traffic.load(tier, processed[tier], answers, drafts).work
        if not len(work) or not strategy.used:
            utilisation.append(0.0)
            continue
        breaks_per_s = tier_sustains_per_s(strategy, work, dispatch) / (len(work) / len(requests))
        limits.append((breaks_per_s, requests.tiers[tier]))
        utilisation.append(offered_per_s / breaks_per_s)
    if grading is not None and not grading.by_tier:
        work = traffic.of_judge(grading, processed).work
        if len(work):
            limits.append((grading.sustained_per_s(work) / (len(work) / len(requests)), JUDGE))
    sustained_per_s, name = min(limits)
    if not np.isfinite(sustained_per_s):
        return None  # a remote tier without limits serves everything
    return SustainedLoad(offered_per_s, sustained_per_s, name, tuple(utilisation))


def tier_sustains_per_s(strategy: Strategy, work: Workload, dispatch: Dispatch) -> float:
    """Requests per second at which the first of a tier's replicas is given more than it serves, or a limit is reached."""
    if strategy.remote is not None:
        return strategy.remote.sustained_per_s(work)
    return together_per_s(
        [count for _, count in strategy.replicas],
        saturated_per_s([replica for replica, _ in strategy.replicas], work),
        [replica.capacity_per_s(*work.mean_tokens) for replica, _ in strategy.replicas],
        dispatch,
    )


def rate_text(per_s: float) -> str:
    """A rate with three digits, or in whole requests."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
