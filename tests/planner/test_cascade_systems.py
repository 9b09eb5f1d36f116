"""What the cascade benchmark holds us against is tuned as well as it can be."""

import itertools

import numpy as np
import pytest

from benchmarks.cascade_systems import least_busy
from penstock.planner_service.routing.quality import SKIPPED, JudgedSample, route
from penstock.planner_service.simulator import Replica
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel

SIZES = (1, 2, 4)
KINDS = [Replica(ReplicaShape(tp, 1), StepLatencyModel.linear(0.01, 0.001, 0.0), 10_000) for tp in SIZES]


@pytest.mark.parametrize("seed", range(12))
def test_no_thresholds_and_no_allocation_leave_the_busiest_tier_less_busy(seed: int) -> None:
    """Against every combination of thresholds and of replicas."""
    rng = np.random.default_rng(seed)
    scores = rng.choice([0.0, 40.0, 70.0, 100.0], (14, 3))
    judged = JudgedSample(("a", "b", "c"), np.full(14, 50), np.full((14, 3), 20), scores)
    per_s, gpus, target = rng.uniform(1, 9, 3).tolist(), 11, float(scores.mean())

    def busiest(thresholds: tuple[float, ...], counts: tuple[int, ...]) -> float:
        shares = route(judged, thresholds).share_processed()
        loads = [s / (n * rate) if n else np.inf for s, n, rate in zip(shares, counts, per_s, strict=True) if s]
        return float(max(loads))

    able = [
        t for t in itertools.product((0.0, 40.0, 70.0, 100.0, SKIPPED), repeat=2) if route(judged, t).quality >= target
    ]
    fitting = [
        counts
        for counts in itertools.product(*(range(gpus // size + 1) for size in SIZES))
        if sum(n * size for n, size in zip(counts, SIZES, strict=True)) <= gpus
    ]
    best = min(busiest(thresholds, counts) for thresholds in able for counts in fitting)
    thresholds, found = least_busy(judged, target, KINDS, per_s, gpus)
    assert route(judged, thresholds).quality >= target - 1e-9
    assert sum(found) <= gpus
    replicas = tuple(count // size for count, size in zip(found, SIZES, strict=True))
    assert busiest(thresholds, replicas) == pytest.approx(best)
