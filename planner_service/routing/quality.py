"""What thresholds do to a profiled sample: who escalates how far, and the quality of what stands. Exact counts. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner_service.simulator.workload import Bools, Floats, Ints
from services.domain.errors import invalid

SKIPPED = 101.0  # a threshold that no score meets: the tier is not asked at all


@dataclass(frozen=True, slots=True, eq=False)
class JudgedSample:
    """N prompts answered and scored by all C tiers. scores (N, C), from 0 to 100; output_tokens (N, C); input_tokens (N)."""

    tiers: tuple[str, ...]
    input_tokens: Ints
    output_tokens: Ints
    scores: Floats

    def __post_init__(self) -> None:
        shape = (len(self.input_tokens), len(self.tiers))
        if self.scores.shape != shape or self.output_tokens.shape != shape:
            raise invalid("quality", f"scores and output tokens must be of shape {shape}")
        if not len(self):
            raise invalid("quality", "no prompts")
        if not ((self.scores >= 0) & (self.scores <= 100)).all():
            raise invalid("quality", "scores must be from 0 to 100")

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def worst(self) -> float:
        """Mean score where the first tier answers all: z2 of CASCADIA, section 3.3."""
        return float(self.scores[:, 0].mean())

    @property
    def best(self) -> float:
        """Mean score where the last tier answers all: z1."""
        return float(self.scores[:, -1].mean())

    def subset(self, rows: Ints) -> "JudgedSample":
        return JudgedSample(self.tiers, self.input_tokens[rows], self.output_tokens[rows], self.scores[rows])

    def levels(self, tier: int) -> Floats:
        """Thresholds of `tier` that differ in what they do: 0, its distinct scores ascending, and SKIPPED.

        At a threshold an answer of just that score stands. Threshold 0 lets everything stand.
        """
        values = np.unique(self.scores[:, tier])
        return np.concatenate(([0.0], values[values > 0], [SKIPPED]))


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """processed (C, N): who reaches each tier. answered (N): the tier whose answer stands. quality: mean score of those."""

    processed: npt.NDArray[np.bool_]
    answered: Ints
    quality: float

    def share_processed(self) -> tuple[float, ...]:
        return tuple(float(row.mean()) for row in self.processed)

    def share_answered(self) -> tuple[float, ...]:
        return tuple(float((self.answered == tier).mean()) for tier in range(len(self.processed)))


def route(sample: JudgedSample, thresholds: Sequence[float]) -> Routed:
    """Each prompt escalates until a tier's score is at least its threshold; the last tier's answers stand.

    A tier whose threshold is above 100 is passed over.
    """
    tiers = len(sample.tiers)
    if len(thresholds) != tiers - 1:
        raise invalid("thresholds", f"{tiers} tiers have {tiers - 1} thresholds, not {len(thresholds)}")
    processed = np.zeros((tiers, len(sample)), np.bool_)
    escalating = np.ones(len(sample), np.bool_)
    answered = np.full(len(sample), tiers - 1, np.int64)
    for tier, threshold in enumerate(thresholds):
        if threshold > 100:
            continue
        processed[tier] = escalating
        stands = escalating & (sample.scores[:, tier] >= threshold)
        answered[stands] = tier
        escalating = escalating & ~stands
    processed[-1] = escalating
    quality = float(sample.scores[np.arange(len(sample)), answered].mean())
    return Routed(processed, answered, quality)


def proportional(sample: JudgedSample) -> tuple[float, ...]:
    """Thresholds with which tier i processes about 1/i of the prompts: where CASCADIA's loop starts."""
    escalating = np.ones(len(sample), np.bool_)
    thresholds = []
    for tier in range(len(sample.tiers) - 1):
        levels = sample.levels(tier)
        expected = len(sample) / (tier + 2)
        counts = np.array([(escalating & (sample.scores[:, tier] < level)).sum() for level in levels])
        threshold = float(levels[int(np.abs(counts - expected).argmin())])
        escalating = escalating & (sample.scores[:, tier] < threshold)
        thresholds.append(threshold)
    return tuple(thresholds)


def chebyshev(latency_s: float, quality: float, target: float, best: float, worst: float, weight: float) -> float:
    """J = L + weight * max(0, (wanted - Q) / (best - worst)) (CASCADIA, section 3.3)."""
    spread = best - worst
    shortfall = max(0.0, target - quality)
    if shortfall == 0.0:
        return latency_s
    return latency_s + weight * shortfall / (spread if spread > 0 else 1.0)


def chebyshev_quality(
    quality: float, latency_s: float, budget_s: float, least_s: float, most_s: float, weight: float
) -> float:
    """J = -Q + weight * max(0, (L - budget) / (most - least)) (CASCADIA, appendix C)."""
    excess = max(0.0, latency_s - budget_s)
    if excess == 0.0:
        return -quality
    return -quality + weight * excess / (most_s - least_s if most_s > least_s else 1.0)


def all_qualities(sample: JudgedSample) -> tuple[list[Floats], npt.NDArray[np.float64]]:
    """(levels of each tier but the last, mean score at every combination of them): the whole grid, by sums.

    Three tiers: Q[a, b] = mean(score_1 where s_1 >= h1_a) + (score_2 where s_1 < h1_a, s_2 >= h2_b) + (score_3 below both).
    ValueError beyond three tiers.
    """
    if len(sample.tiers) > 3:
        raise ValueError("the grid is for up to three tiers")
    n, scores = len(sample), sample.scores
    levels = [sample.levels(tier) for tier in range(len(sample.tiers) - 1)]
    if not levels:
        return [], np.array(scores[:, 0].mean())
    below: list[Bools] = [scores[None, :, t] < level[:, None] for t, level in enumerate(levels)]  # (levels, N)
    first = (~below[0] * scores[:, 0]).sum(axis=1)
    if len(levels) == 1:
        return levels, (first + (below[0] * scores[:, 1]).sum(axis=1)) / n
    second = below[0].astype(np.float64) @ (~below[1] * scores[:, 1]).T
    third = below[0].astype(np.float64) @ (below[1] * scores[:, 2]).T
    return levels, (first[:, None] + second + third) / n
