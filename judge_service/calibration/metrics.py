"""How well scores tell good answers from bad ones. No I/O."""

from collections.abc import Hashable
from collections.abc import Sequence as Seq

import numpy as np

FOLDS = 5


def brier(scores: Seq[float], good: Seq[bool]) -> float:
    """Mean squared error of score / 100 (Brier 1950): 0 is perfect, 0.25 is what a score of 50 for everything gets."""
    return float(np.mean((np.asarray(scores, float) / 100 - np.asarray(good, float)) ** 2))


def folds(groups: Seq[Hashable], count: int = FOLDS) -> np.ndarray:
    """The fold of each sample, 0 to count - 1. Samples of one group (answers to one prompt) are in one fold.

    Groups go to folds in order of their first appearance, in turn, so equal samples always give equal folds. With fewer
    groups than folds, each sample is a group.
    """
    order = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    if len(order) < count:
        return np.arange(len(groups)) % count
    return np.asarray([order[group] % count for group in groups])
