"""Maps raw scores to scores from 0 to 100: the share of good answers among those with that raw score.

Isotonic regression of labels on raw scores (Zadrozny and Elkan 2002): the monotone curve with the smallest squared error,
interpolated linearly between its steps. No I/O but that of `Fitted`.
"""

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from penstock.judge_service.calibration import metrics
from penstock.judge_service.calibration.fitted import Fitted, suffice, too_few
from penstock.services.domain.auc import auc


@dataclass(frozen=True, slots=True)
class Calibration(Fitted):
    """A monotone curve through (raw[i], score[i]), constant beyond its ends. Both are ascending.

    samples: number of samples that it was fitted to. brier: mean squared error of score / 100, cross-validated: each sample
    is scored by a curve that was fitted without it. brier_before: of the scores without calibration. auc: of raw.
    """

    raw: tuple[float, ...]
    score: tuple[float, ...]
    samples: int
    brier: float
    brier_before: float
    auc: float | None = None

    def apply(self, raw: float) -> float:
        """The calibrated score, 0 to 100."""
        return float(np.interp(raw, self.raw, self.score))

    @property
    def summary(self) -> str:
        """Its quality in a line."""
        auc = f"AUC {self.auc:.3f}, " if self.auc is not None else ""
        before = f"(without calibration {self.brier_before:.3f})"
        return f"{self.samples} samples, {auc}Brier score {self.brier:.3f} cross-validated {before}"

    def problem(self) -> str:
        if not self.raw or len(self.raw) != len(self.score):
            return "raw and score must have the same length, at least 1"
        if list(self.raw) != sorted(self.raw) or list(self.score) != sorted(self.score):
            return "raw and score must ascend"
        return ""


def fit(raw: Seq[float], good: Seq[bool], uncalibrated: Seq[float], groups: Seq[Hashable] | None = None) -> Calibration:
    """Fit a calibration to labelled samples.

    groups: samples of one group, such as answers to one prompt, are never both fitted to and measured on; None: each sample
    is a group.

    Raises:
        CalibrationError: There are too few samples, or all have the same label.
    """
    if not suffice(good):
        raise too_few(len(good))
    x, y = np.asarray(raw, float), np.asarray(good, float)
    knots_x, knots_y = _curve(x, y)
    brier = metrics.brier(held_out_scores(raw, good, groups), good)
    before = metrics.brier(uncalibrated, good)
    return Calibration(tuple(knots_x), tuple(knots_y), len(x), brier, before, auc(raw, good))


def held_out_scores(raw: Seq[float], good: Seq[bool], groups: Seq[Hashable] | None = None) -> list[float]:
    """The score of each sample by the curve that is fitted to the other folds. groups: as for `fit`."""
    x, y = np.asarray(raw, float), np.asarray(good, float)
    fold = metrics.folds(range(len(x)) if groups is None else groups)
    scores = np.zeros(len(x))
    for number in np.unique(fold):
        others = fold != number
        curve = _curve(x[others], y[others]) if others.any() else ([0.0], [50.0])
        scores[fold == number] = np.interp(x[fold == number], *curve)
    return [*map(float, scores)]


def _curve(x: np.ndarray, y: np.ndarray) -> tuple[list[float], list[float]]:
    """(raw scores, scores from 0 to 100) of the knots, one in the middle of each step of the isotonic regression."""
    from scipy.optimize import isotonic_regression  # half a second of imports, which only fitting needs

    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    levels = isotonic_regression(y).x
    knots_x, knots_y = [], []
    for start in np.flatnonzero(np.diff(levels, prepend=-1.0)):
        block = levels == levels[start]
        knots_x.append(float(x[block].mean()))
        knots_y.append(float(levels[start] * 100))
    if len(knots_x) == 1:
        knots_x, knots_y = [float(x[0]), float(x[-1])], [knots_y[0]] * 2
    return knots_x, knots_y
