"""What a plan reaches on other stretches of the same workload: means with intervals. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from planner_service.cascade_simulation import run_cascade
from planner_service.deployment.search import Strategy
from planner_service.simulator import Dispatch
from planner_service.simulator.felt import Objective
from planner_service.site import Demand, Site

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """Of a percentile over several runs: their mean, and between which it lies with CONFIDENCE (Student's t)."""

    mean: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        mean = float(np.mean(values))
        if len(values) < 2:
            return cls(mean, mean, mean, len(values))
        half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2) * np.std(values, ddof=1) / np.sqrt(len(values)))
        return cls(mean, max(0.0, mean - half), mean + half, len(values))


def repeated(
    site: Site,
    runs: Sequence[Demand],
    thresholds: Sequence[float],
    strategies: Sequence[Strategy],
    dispatch: Dispatch,
    latencies: Sequence[tuple[Objective, float]],
) -> list[Interval]:
    """The latencies of a plan, each an objective with a percentile, on each of `runs`, at least one."""
    values: list[list[float]] = [[] for _ in latencies]
    for demand in runs:
        run = run_cascade(site, demand, thresholds, strategies, dispatch)
        for known, (objective, percentile) in zip(values, latencies, strict=True):
            known.append(run.latency_s(objective, percentile))
    return [Interval.of(known) for known in values]
