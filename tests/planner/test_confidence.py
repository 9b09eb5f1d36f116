"""The quality that is promised holds on new requests as often as was said."""

import numpy as np
import pytest

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.routing.confidence import Promise, answered_quality, p_value, promised
from penstock.planner_service.routing.quality import JudgedSample, all_qualities
from penstock.planner_service.routing.solution import Deployment, Proof, Solution, Unreachable
from penstock.services.domain.errors import InvalidRequest


def test_a_true_mean_is_refuted_no_more_often_than_delta() -> None:
    """Scores whose mean is just the target: at delta 0.1 at most one draw in ten may look better."""
    rng = np.random.default_rng(1)
    smooth, coarse = (rng.beta(2, 2, (600, 150)) * 100).tolist(), ((rng.random((600, 150)) < 0.5) * 100.0).tolist()
    for draws in (smooth, coarse):
        refuted = sum(p_value(np.array(scores, float), 50.0) <= 0.1 for scores in draws)
        assert refuted <= 0.1 * 600 + 3 * np.sqrt(600 * 0.09)


def test_a_clearly_better_mean_is_seen() -> None:
    rng = np.random.default_rng(2)
    assert np.mean([p_value(rng.beta(5, 3, 250) * 100, 55.0) <= 0.05 for _ in range(100)]) > 0.9
    assert p_value(np.full(50, 30.0), 50.0) == 1.0
    assert p_value(np.full(400, 90.0), 50.0) < 1e-6


def population(rng: np.random.Generator, count: int) -> JudgedSample:
    hard = rng.beta(1.2, 1.8, count) * 2
    columns = [
        np.clip(best - loss * hard + rng.normal(0, 12, count), 0, 100) for best, loss in ((88, 30), (92, 17), (96, 9))
    ]
    ones = np.ones(count, np.int64)
    return JudgedSample(("a", "b", "c"), ones, np.ones((count, 3), np.int64), np.stack(columns, axis=1))


def cheapest(target: float, on: JudgedSample) -> Solution:
    """Instead of a deployment: the routing that meets the target with the fewest requests escalating."""
    levels, qualities = all_qualities(on)
    if not (qualities >= target).any():
        raise Unreachable("no", float(qualities.max()))
    work = np.add.outer(np.arange(len(levels[0])), np.arange(len(levels[1])))
    at = np.unravel_index(int(np.where(qualities >= target, work, 10**9).argmin()), work.shape)
    thresholds = tuple(float(levels[t][i]) for t, i in enumerate(at))
    deployment = Deployment((1, 1, 1), (Strategy((), 0.0),) * 3, 1.0)
    return Solution(thresholds, float(qualities[at]), deployment, Proof.ENUMERATED, 0.0, 1)


def test_promises_are_kept_on_new_requests() -> None:
    """Over samples of 240 prompts, a promise at 90 % fails at most one time in ten, where the sample's mean fails often."""
    rng = np.random.default_rng(3)
    everyone = population(rng, 20_000)
    broken = plainly_broken = made = 0
    for seed in range(60):
        sample = everyone.subset(rng.integers(0, len(everyone), 240))
        plain = cheapest(80.0, sample)
        plainly_broken += answered_quality(everyone, plain.thresholds).mean() < 80.0
        try:
            promise = promised(sample, 80.0, 0.9, seed, cheapest)
        except Unreachable:
            continue
        made += 1
        broken += answered_quality(everyone, promise.solution.thresholds).mean() < 80.0
    assert made >= 50
    assert broken <= 0.1 * made + 2 * np.sqrt(made * 0.09)
    assert plainly_broken > 2 * max(1, broken)


def test_what_cannot_be_promised_is_said() -> None:
    sample = population(np.random.default_rng(4), 200)
    with pytest.raises(Unreachable, match="cannot be promised with 99%"):
        promised(sample, 88.0, 0.99, 1, cheapest)
    for confidence in (0.3, 1.0):
        with pytest.raises(InvalidRequest, match="confidence"):
            promised(sample, 70.0, confidence, 1, cheapest)
    with pytest.raises(InvalidRequest, match="40 judged prompts"):
        promised(sample.subset(np.arange(20)), 70.0, 0.9, 1, cheapest)
    found = promised(sample, 70.0, 0.9, 1, cheapest)
    assert isinstance(found, Promise)
    assert found.tested_prompts == 100
    assert found.aimed_at >= 70
