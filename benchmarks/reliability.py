"""Scores against the share of good answers."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

BINS = 10


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Answers with scores of one range. predicted: their mean score / 100; good: the share of good ones among them."""

    predicted: float
    good: float
    count: int


def reliability(scores: Seq[float], good: Seq[bool]) -> list[ReliabilityBin]:
    """BINS ranges of scores from 0 to 100, of equal width; empty ones are left out."""
    x, y = np.asarray(scores, float), np.asarray(good, float)
    bins = np.minimum((x / 100 * BINS).astype(int), BINS - 1)
    return [
        ReliabilityBin(float(x[bins == i].mean() / 100), float(y[bins == i].mean()), int((bins == i).sum()))
        for i in np.unique(bins)
    ]
