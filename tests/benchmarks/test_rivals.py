"""The benchmark of rivals routes as the planner does, and its drafts cost what verifying takes."""

import itertools

import numpy as np
import pytest

from benchmarks.rivals import ratio_at_equal_quality
from benchmarks.rivals.families import Prompts
from benchmarks.rivals.systems import Cascade, cascades
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.simulator import Replica
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.rules import AcceptanceRules

TIERS = ("small", "medium", "large")


def prompts(seed: int, count: int = 60) -> Prompts:
    rng = np.random.default_rng(seed)
    quality = np.clip(np.array([50, 70, 85]) + rng.normal(0, 20, (count, 3)), 0, 100).round()
    predicted = np.clip(quality + rng.normal(0, 15, quality.shape), 0, 100)
    fresh = np.array([1.0, 3.0, 10.0]) * rng.uniform(0.5, 2, (count, 3))
    return Prompts(TIERS, quality, quality, fresh, 0.7 * fresh, 0.1 * fresh, predicted)


@pytest.mark.parametrize("seed", range(5))
def test_cascades_are_routed_as_plans_are(seed: int) -> None:
    """Quality and GPU seconds are those of the requests that reach each tier by the planner's routing with the same skip
    rule; the cheapest of all thresholds is no dearer than any that is tried one by one, but for steps between levels."""
    given, drafts = prompts(seed), bool(seed % 2)
    tokens = np.ones(given.quality.shape, np.int64)
    sample = JudgedSample(TIERS, tokens[:, 0], tokens, given.scores, given.predicted)
    dearer = []
    for first, second, limit in itertools.product((0.0, 40.0, 60.0), (50.0, 80.0), (-1.0, 45.0)):
        system = Cascade((0, 1, 2), (first, second), (limit, limit), drafts)
        routed = route(sample.under(AcceptanceRules(skip_below=(limit, limit))), (first, second))
        processed = routed.processed.T
        earlier = np.column_stack(
            [np.zeros(len(tokens), np.bool_), np.logical_or.accumulate(processed, axis=1)[:, :-1]]
        )
        each_s = np.where(earlier & drafts, given.drafted_s, given.fresh_s)
        judged_s = given.judging_s * np.array([first > 0, second > 0, False])
        gpu_s, quality = system.run(given)
        assert quality == pytest.approx(routed.quality)
        assert gpu_s == pytest.approx((processed * (each_s + judged_s)).sum() / len(tokens))
        dearer.append((quality, gpu_s))
    (best,) = cascades(given, (0, 1, 2), [75.0], drafts=drafts, skips=False)
    assert best is not None
    assert best.quality >= 75.0
    assert best.gpu_s <= min(gpu_s for quality, gpu_s in dearer if quality >= 75.0) * 1.2
    assert best.system.run(given) == pytest.approx((best.gpu_s, best.quality))


def test_a_given_draft_pays_where_weights_are_what_a_step_waits_for() -> None:
    """With steps that take as long for any number of tokens, each pass brings 1 + a + a^2 + ... of them; with steps that take
    as long as their tokens, wrong drafts cost."""
    memory, compute = (StepLatencyModel((0.0, 1.0), knots) for knots in ((1.0, 1.0), (0.0, 1.0)))
    shape = ReplicaShape(1, 1)
    bound = Replica(shape, memory, 1_000_000)
    assert bound.capacity_per_s(1, 100, 0, 2, 0.5) / bound.capacity_per_s(1, 100) == pytest.approx(1.75, rel=0.02)
    busy = Replica(shape, compute, 1_000_000)
    assert busy.capacity_per_s(1, 100, 0, 2, 0.5) < busy.capacity_per_s(1, 100)
    assert busy.capacity_per_s(1, 100, 0, 0, 0.5) == busy.capacity_per_s(1, 100)


def test_ratios_at_equal_quality_are_read_from_the_rivals_curve() -> None:
    """A way on the curve has the ratio one, a cheaper one less; a dearer rival with less quality does not count."""
    quality, log_s = np.array([50.0, 55, 60, 70]), np.log([1.0, 4.0, 2.0, 8.0])
    curves = np.repeat(np.column_stack([quality, log_s])[None], 5, axis=0)
    for ours, gpu_s, expected in ((65.0, 4.0, 1.0), (57.0, 1.0, 0.5), (80.0, 4.0, 0.5)):
        found = ratio_at_equal_quality(np.tile([ours, np.log(gpu_s)], (5, 1)), curves)
        assert list(found.values()) == pytest.approx([expected] * 3)
