"""Judged answers of random prompts."""

import numpy as np

from penstock.planner_service.routing.quality import JudgedSample

TIERS = ("small", "medium", "large")


def judged_sample(seed: int, tiers: int = 3, count: int = 60, *, known: bool = False) -> JudgedSample:
    """Few scores are distinct, so that many are just at a threshold; predictions know something of them. known: it is known
    which answers are right, more of them in later tiers; scores tell little of that."""
    rng, shape = np.random.default_rng(seed), (count, tiers)
    scores = np.asarray(rng.integers(0, 6, shape) * 20.0, np.float64)
    predicted = np.asarray(np.clip(scores + rng.normal(0, 25, shape), 0, 100), np.float64)
    right = rng.random(shape) < np.linspace(0.4, 0.9, tiers)
    lengths = rng.integers(1, 50, count), rng.integers(1, 90, shape)
    quality = right.astype(np.float64) * 100 if known else None
    return JudgedSample(TIERS[:tiers], *lengths, scores, predicted, known_quality=quality)
