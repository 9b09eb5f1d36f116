"""The ladder of thresholds by which a plan gives way under a burst. No I/O.

Step 0 has the plan's own thresholds. Each further step accepts more answers at lower tiers: it sustains a higher rate and has
a lower mean quality. `burst_control` chooses the step.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.domain.errors import FieldProblem
from services.domain.randomness import TIE, uniform

MAX_BURST_STEPS = 16


@dataclass(frozen=True, slots=True)
class BurstThreshold:
    """Answers that score more than `score`, 0 to 100, are accepted, and `tie_share` of those that score exactly that."""

    score: float
    tie_share: float = 1.0


@dataclass(frozen=True, slots=True)
class BurstStep:
    """thresholds: of the tiers but the last. quality: the planned mean score of the accepted answers, 0 to 100.

    rate_per_s: arrivals of the whole mesh up to which the step is used. tier: the one that limits the rate. tier_share: of
    the requests, those that reach this tier, over 0.
    """

    thresholds: tuple[BurstThreshold, ...]
    quality: float
    rate_per_s: float
    tier: str
    tier_share: float


@dataclass(frozen=True, slots=True)
class BurstLadder:
    """steps: at least two, the first with the plan's own thresholds. mean_quality: that the mean over requests holds."""

    mean_quality: float
    steps: tuple[BurstStep, ...]


def tie_accepted(tie_share: float, draw: float) -> bool:
    """Whether an answer that scores exactly the threshold is accepted. draw: a random number from 0 to 1, less than 1."""
    return draw < tie_share


def tie_draw(seed: int, tier: int) -> float:
    """The random number of a request for ties at a tier of its plan: the same request gets the same decision."""
    return uniform(seed, tier, TIE)


def ladder_problems(
    ladder: BurstLadder, tiers: Sequence[str], thresholds: Sequence[float | None], path: str
) -> Iterator[FieldProblem]:
    """What is wrong with a ladder for these tiers, whose own thresholds (None for the last) are `thresholds`."""
    if not 2 <= len(ladder.steps) <= MAX_BURST_STEPS:
        yield FieldProblem(f"{path}.steps", f"must be 2 to {MAX_BURST_STEPS}, not {len(ladder.steps)}")
        return
    if not 0 <= ladder.mean_quality <= 100:
        yield FieldProblem(f"{path}.mean_quality", f"must be from 0 to 100, not {ladder.mean_quality}")
    elif ladder.mean_quality > ladder.steps[0].quality:
        yield FieldProblem(
            f"{path}.mean_quality",
            f"must be at most the quality of steps[0], {ladder.steps[0].quality}, not {ladder.mean_quality}",
        )
    unsound = False
    for i, step in enumerate(ladder.steps):
        for problem in _step_problems(step, tiers, f"{path}.steps[{i}]"):
            unsound = True
            yield problem
    if unsound:
        return
    for j, (rule, own) in enumerate(zip(ladder.steps[0].thresholds, thresholds, strict=False)):
        if own is not None and rule != BurstThreshold(own):
            yield FieldProblem(f"{path}.steps[0].thresholds[{j}]", f"must be the tier's own threshold, {own}")
    for i, (before, step) in enumerate(pairwise(ladder.steps), 1):
        yield from _order_problems(before, step, f"{path}.steps[{i}]")


def _step_problems(step: BurstStep, tiers: Sequence[str], path: str) -> Iterator[FieldProblem]:
    if len(step.thresholds) != len(tiers) - 1:
        yield FieldProblem(
            f"{path}.thresholds",
            f"must be {len(tiers) - 1}, one for each tier but the last, not {len(step.thresholds)}",
        )
    for j, rule in enumerate(step.thresholds):
        if not 0 <= rule.score <= 100:
            yield FieldProblem(f"{path}.thresholds[{j}].score", f"must be from 0 to 100, not {rule.score}")
        if not 0 < rule.tie_share <= 1:
            yield FieldProblem(
                f"{path}.thresholds[{j}].tie_share", f"must be over 0 and at most 1, not {rule.tie_share}"
            )
    if not 0 <= step.quality <= 100:
        yield FieldProblem(f"{path}.quality", f"must be from 0 to 100, not {step.quality}")
    if not 0 < step.rate_per_s < math.inf:
        yield FieldProblem(f"{path}.rate_per_s", f"must be over 0 and finite, not {step.rate_per_s}")
    if step.tier not in tiers:
        yield FieldProblem(f"{path}.tier", f"no tier '{step.tier[:80]}' in the plan")
    if not 0 < step.tier_share <= 1:
        yield FieldProblem(f"{path}.tier_share", f"must be over 0 and at most 1, not {step.tier_share}")


def _order_problems(before: BurstStep, step: BurstStep, path: str) -> Iterator[FieldProblem]:
    if step.rate_per_s <= before.rate_per_s:
        yield FieldProblem(f"{path}.rate_per_s", f"must be over that of the step before, {before.rate_per_s}")
    if step.quality > before.quality:
        yield FieldProblem(f"{path}.quality", f"must be at most that of the step before, {before.quality}")
    for j, (old, new) in enumerate(zip(before.thresholds, step.thresholds, strict=True)):
        if not accepts_as_much(new, old):
            yield FieldProblem(f"{path}.thresholds[{j}]", "must accept all that the step before accepts")


def accepts_as_much(rule: BurstThreshold, other: BurstThreshold) -> bool:
    """Whether a rule accepts every answer that the other accepts."""
    return rule.score < other.score or (rule.score == other.score and rule.tie_share >= other.tie_share)
