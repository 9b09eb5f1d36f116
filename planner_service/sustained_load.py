"""Whether a deployment keeps up with the rate that it is planned for. No I/O.

A plan is made for some hundred requests. Where they come faster than they are served, their latency says how long that burst
takes, and nothing about requests that keep coming: each waits longer than the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner_service.deployment.search import Strategy
from planner_service.routing.quality import JudgedSample, route
from planner_service.simulator.workload import Floats


@dataclass(frozen=True, slots=True)
class SustainedLoad:
    """offered_per_s: arrivals per second. sustained_per_s: those that the deployment keeps up with, which `tier` limits."""

    offered_per_s: float
    sustained_per_s: float
    tier: str

    @property
    def overloaded(self) -> bool:
        return self.offered_per_s > self.sustained_per_s

    def __str__(self) -> str:
        if not self.overloaded:
            return f"keeps up with {_rate(self.sustained_per_s)} requests/s"
        return (
            f"overloaded: {_rate(self.offered_per_s)} requests/s are offered, and {self.tier} keeps up with "
            f"{_rate(self.sustained_per_s)}: requests that go on coming wait longer and longer"
        )


def sustained_load(
    requests: JudgedSample, arrival_s: Floats, thresholds: Sequence[float], strategies: Sequence[Strategy]
) -> SustainedLoad | None:
    """What each tier serves with all lanes full, over the share of requests that reaches it; the least of all tiers.

    requests: one per arrival of `arrival_s` (N, ascending). None where the arrivals have no rate: they come all at once.
    """
    span_s = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) else 0.0
    if span_s <= 0:
        return None
    offered_per_s = (len(arrival_s) - 1) / span_s
    limits: list[tuple[float, str]] = []
    for tier, (chosen, strategy) in enumerate(zip(route(requests, thresholds).processed, strategies, strict=True)):
        if not chosen.any():
            continue
        inputs = float(np.mean(requests.input_tokens[chosen]))
        outputs = float(np.mean(requests.output_tokens[chosen, tier]))
        capacity = sum(count * replica.capacity_per_s(inputs, outputs) for replica, count in strategy.replicas)
        limits.append((capacity / float(chosen.mean()), requests.tiers[tier]))
    sustained_per_s, name = min(limits)
    return SustainedLoad(offered_per_s, sustained_per_s, name)


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
