"""What thresholds do to a profiled sample: who escalates, and the quality of what is accepted. Exact counts. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.planner_service.simulator.felt import Replies
from penstock.planner_service.simulator.workload import Bools, Floats, Ints
from penstock.services.acceptance.judged import JudgedSample as JudgedSample
from penstock.services.acceptance.threshold import SKIPPED as SKIPPED
from penstock.services.domain.errors import invalid

ROUTED_LEVELS = 64  # limits of a tier that are tried where prompts are routed


def replies(sample: JudgedSample, processed: Bools) -> Replies:
    """What users get. processed (C, N): who reaches each tier."""
    return Replies(sample.delivered(processed), sample.held(processed), sample.output_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """processed (C, N): who reaches each tier. answered (N): the tier whose answer is the reply. quality: mean of those."""

    processed: npt.NDArray[np.bool_]
    answered: Ints
    quality: float

    def share_processed(self) -> tuple[float, ...]:
        return tuple(float(row.mean()) for row in self.processed)

    def share_answered(self) -> tuple[float, ...]:
        return tuple(float((self.answered == tier).mean()) for tier in range(len(self.processed)))


def route(sample: JudgedSample, thresholds: Sequence[float]) -> Routed:
    """Each prompt escalates until a tier's score is at least its threshold; the last tier's answers are accepted.

    A tier whose threshold is above 100 is passed over.
    """
    tiers = len(sample.tiers)
    if len(thresholds) != tiers - 1:
        raise invalid("thresholds", f"{tiers} tiers have {tiers - 1} thresholds, not {len(thresholds)}")
    processed = sample.processed(thresholds)
    answered = sample.delivered(processed)
    return Routed(processed, answered, float(sample.quality[np.arange(len(sample)), answered].mean()))


def routed_sample(judged: JudgedSample, of: JudgedSample | None = None) -> JudgedSample:
    """`of`, or the judged prompts, each sent to one tier by its predicted scores. The limits that are tried are at quantiles
    of those of the judged prompts."""
    shares = np.linspace(0, 1, ROUTED_LEVELS)
    levels = [np.unique([0.0, *np.quantile(of_tier, shares, method="lower")]) for of_tier in judged.lead.T]
    return (of or judged).routed_by(levels)


def answered_quality(sample: JudgedSample, thresholds: Sequence[float]) -> Floats:
    """(N) the quality of the accepted answer."""
    return np.asarray(sample.quality[np.arange(len(sample)), route(sample, thresholds).answered])


def all_qualities(sample: JudgedSample) -> tuple[list[Floats], npt.NDArray[np.float64]]:
    """(levels of each tier but the last, mean quality at every combination of them): the whole grid, by sums.

    Three tiers: Q[a, b] = mean((q_1 where s_1 >= h1_a) + (q_2 where s_1 < h1_a, s_2 >= h2_b) + (q_3 below both)), with
    scores s and qualities q, of the best answer so far with `highest_delivered`. ValueError beyond three tiers.
    """
    if len(sample.tiers) > 3:
        raise ValueError("the grid is for up to three tiers")
    n = len(sample)
    levels = [sample.levels(tier) for tier in range(len(sample.tiers) - 1)]
    if not levels:
        return [], np.array(sample.quality[:, 0].mean())
    compared = sample.comparable
    below: list[Bools] = [compared[None, :, t] < level[:, None] for t, level in enumerate(levels)]  # (levels, N)
    first = (~below[0] * sample.quality[:, 0]).sum(axis=1)
    if len(levels) == 1:
        qualities = first + (below[0] * sample.quality_over((0, 1))).sum(axis=1)
        if sample.highest_delivered:
            qualities[-1] = sample.quality[:, 1].sum()  # the first tier is passed over
        return levels, qualities / n

    escalating = below[0].astype(np.float64)
    second = escalating @ (~below[1] * sample.quality_over((0, 1))).T
    third = escalating @ (below[1] * sample.quality_over((0, 1, 2))).T
    qualities = first[:, None] + second + third
    if sample.highest_delivered:  # answers of a tier that is passed over are no replies
        qualities[:, -1] = first + escalating @ sample.quality_over((0, 2))
        without_first = np.where(below[1], sample.quality_over((1, 2)), sample.quality[:, 1])
        qualities[-1] = [*without_first.sum(axis=1)[:-1], sample.quality[:, 2].sum()]
    return levels, qualities / n
