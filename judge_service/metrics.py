"""How well scores tell good answers from bad ones. No I/O."""

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

FOLDS = 5
BINS = 10


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Answers with scores of one range. predicted: their mean score / 100; good: the share of good ones among them."""

    predicted: float
    good: float
    count: int


def auc(raw: Seq[float], good: Seq[bool]) -> float:
    """The probability that a good answer has a higher raw score than a bad one, ties counted half (Mann and Whitney).

    0.5 if all answers have the same label.
    """
    x, y = np.asarray(raw, float), np.asarray(good, bool)
    positive, negative = int(y.sum()), int((~y).sum())
    if not positive or not negative:
        return 0.5
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # mean rank of ties, from 1
    return float((ranks[y].sum() - positive * (positive + 1) / 2) / (positive * negative))


def brier(scores: Seq[float], good: Seq[bool]) -> float:
    """Mean squared error of score / 100 (Brier 1950): 0 is perfect, 0.25 is what a score of 50 for everything gets."""
    return float(np.mean((np.asarray(scores, float) / 100 - np.asarray(good, float)) ** 2))


def reliability(scores: Seq[float], good: Seq[bool]) -> list[ReliabilityBin]:
    """BINS ranges of scores from 0 to 100, of equal width; empty ones are left out."""
    x, y = np.asarray(scores, float), np.asarray(good, float)
    bins = np.minimum((x / 100 * BINS).astype(int), BINS - 1)
    return [
        ReliabilityBin(float(x[bins == i].mean() / 100), float(y[bins == i].mean()), int((bins == i).sum()))
        for i in np.unique(bins)
    ]


def folds(groups: Seq[Hashable], count: int = FOLDS) -> np.ndarray:
    """The fold of each sample, 0 to count - 1. Samples of one group (answers to one prompt) are in one fold.

    Groups go to folds in order of their first appearance, in turn, so equal samples always give equal folds. With fewer
    groups than folds, each sample is a group.
    """
    order: dict[Hashable, int] = {}
    for group in groups:
        order.setdefault(group, len(order))
    if len(order) < count:
        return np.arange(len(groups)) % count
    return np.asarray([order[group] % count for group in groups])
