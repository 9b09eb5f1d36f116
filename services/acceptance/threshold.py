"""The threshold: an answer is accepted from a score on, that of its tier (CASCADIA, section 3.1). No I/O."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.services.acceptance.arrays import Floats

SKIPPED = 101.0  # a threshold that no score meets: the tier is not asked at all


def accepts_all(threshold: float) -> bool:
    """Whether no score is too low: then answers are neither held nor judged."""
    return threshold <= 0


def levels(scores: "Floats", *, also_best: bool = False) -> "Floats":
    """What planning tries: thresholds that differ in what they do. scores (N): of a tier's answers.

    0, the distinct scores over it, ascending, and SKIPPED. also_best: the best possible score is one in any case.
    """
    import numpy as np

    values = np.unique([*scores, 100.0] if also_best else scores)
    return np.unique([0.0, *values[values > 0], SKIPPED])
