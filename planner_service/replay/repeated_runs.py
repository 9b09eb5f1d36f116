"""What a plan reaches on other stretches of the same workload: means with intervals. No I/O."""

from collections.abc import Sequence

import numpy as np

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.simulator import Dispatch
from penstock.types.planned import Interval
from penstock.types.planning import Objective

CONFIDENCE = 0.95


def interval_of(values: Sequence[float]) -> Interval:
    """Of a percentile over several runs, with CONFIDENCE (Student's t)."""
    from scipy.special import stdtrit  # a quarter of a second of imports

    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, mean, mean, len(values))
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return Interval(mean, max(0.0, mean - half), mean + half, len(values))


def repeated(
    site: Site,
    runs: Sequence[Demand],
    thresholds: Sequence[float],
    strategies: Sequence[Strategy],
    dispatch: Dispatch,
    latencies: Sequence[tuple[Objective, float]],
) -> list[Interval]:
    """The latencies of a plan, each an objective with a percentile, on each of `runs`, at least one."""
    values = []
    for demand in runs:
        run = run_cascade(site, demand, thresholds, strategies, dispatch)
        values.append([run.latency_s(objective, percentile) for objective, percentile in latencies])
    return [interval_of(of_runs) for of_runs in zip(*values, strict=True)]
