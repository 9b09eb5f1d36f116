"""A cascade in virtual time whose limits move with the load, against the routing of plans."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.priced_simulation import PricedRouting, PricedRun, simulate_priced
from penstock.planner_service.question.site import Demand
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.simulator import EngineLimits, Replica
from penstock.services.acceptance.wait_price import Price
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.plans import TierPlan
from penstock.types.rules import AcceptanceRules

TIERS = ("small", "medium", "large")
STEPS = StepLatencyModel((1.0, 2048.0), (0.01, 0.2))
REPLICAS = [[Replica(ReplicaShape(1, 1), STEPS, 400_000, EngineLimits(64, 2048, 16))] * 2] * 3
THRESHOLDS, LIMITS = (60.0, 50.0), (30.0, None)


def demand(gap_s: float, count: int = 200, seed: int = 3) -> Demand:
    rng = np.random.default_rng(seed)
    scores = np.asarray(rng.uniform(0, 100, (count, 3)))
    predicted = np.clip(scores + rng.normal(0, 20, scores.shape), 0, 100)
    inputs, outputs = rng.integers(200, 2000, count), rng.integers(20, 300, (count, 3))
    requests = JudgedSample(TIERS, inputs, outputs, scores, predicted)
    return Demand(requests, requests, np.linspace(0.0, (count - 1) * gap_s, count))


def served(demand: Demand, price: float, skips: tuple[float | None, ...] = LIMITS) -> PricedRun:
    limits = zip(TIERS, (*THRESHOLDS, None), (*skips, None), strict=True)
    tiers = tuple(TierPlan(name, "m", threshold, 2, skip_below=skip) for name, threshold, skip in limits)
    return simulate_priced(demand, PricedRouting(tiers, Price(price)), REPLICAS, 0.05)


@pytest.mark.parametrize("gap_s", [0.02, 1.0])
def test_without_a_price_requests_visit_the_tiers_that_the_plan_says(gap_s: float) -> None:
    requests = demand(gap_s)
    run = served(requests, 0.0)
    routed = route(requests.requests.under(AcceptanceRules(skip_below=LIMITS)), THRESHOLDS)
    assert (run.visited == routed.processed).all()
    answered = requests.requests.quality[np.arange(len(requests.requests)), routed.answered]
    assert run.quality == pytest.approx(answered)


@pytest.mark.slow
def test_with_idle_tiers_a_price_changes_nothing() -> None:
    """No request comes before the one before it has its answer."""
    apart = demand(60.0, count=60)
    free, priced = served(apart, 0.0), served(apart, 50.0)
    assert free.total_s.max() < 60.0
    assert (priced.visited == free.visited).all()
    assert (priced.total_s == free.total_s).all()


def test_under_load_a_price_buys_time_for_quality() -> None:
    """The higher the price, the sooner the answers, and the fewer points they are worth."""
    burst = demand(0.02)
    runs = [served(burst, price, (None, None)) for price in (0.0, 20.0, 200.0)]
    p95_s = [float(np.percentile(run.total_s, 95)) for run in runs]
    assert p95_s == sorted(p95_s, reverse=True)
    assert p95_s[-1] < 0.7 * p95_s[0]
    assert runs[-1].quality.mean() < runs[0].quality.mean()
    assert runs[-1].visited.sum() < runs[0].visited.sum(), "answers"


def test_a_crowded_tier_is_passed_over() -> None:
    """Where the first tier has a tenth of the throughput of the others."""
    slow = [[replace(REPLICAS[0][0], latency=StepLatencyModel((1.0, 2048.0), (0.1, 2.0)))], *REPLICAS[1:]]
    tiers = tuple(TierPlan(name, "m", limit, 1) for name, limit in zip(TIERS, (0.0, 0.0, None), strict=True))
    free, priced = (
        simulate_priced(demand(0.1), PricedRouting(tiers, Price(price)), slow, 0.05) for price in (0.0, 20.0)
    )
    assert free.visited[0].all()
    assert 0.0 < priced.visited[0].mean() < 0.5
    assert np.percentile(priced.total_s, 95) < 0.7 * np.percentile(free.total_s, 95)
