"""From raw scores to 0-100: the share of good answers among those that score so. No I/O but reading and writing the file.

Isotonic regression of labels on raw scores (Zadrozny and Elkan 2002): the one monotone curve of least squared error.
Between its steps the curve is linear, so that thresholds can fall anywhere.
"""

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

MIN_SAMPLES = 20


class CalibrationError(Exception):
    """The samples or the file cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A monotone curve through (raw[i], score[i]), level beyond its ends; both ascending.

    samples, brier, brier_before: how many samples it was fitted on, and the mean squared error of score / 100 on them
        with it and without.
    """

    raw: tuple[float, ...]
    score: tuple[float, ...]
    samples: int
    brier: float
    brier_before: float

    def apply(self, raw: float) -> float:
        """The calibrated score, 0 to 100."""
        return float(np.interp(raw, self.raw, self.score))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """CalibrationError if it is not a calibration file."""
        try:
            data = json.loads(path.read_text())
            made = cls(tuple(data["raw"]), tuple(data["score"]), data["samples"], data["brier"], data["brier_before"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CalibrationError(f"{path}: {error!r}") from error
        if not made.raw or len(made.raw) != len(made.score):
            raise CalibrationError(f"{path}: raw and score must be equally many, at least one")
        if list(made.raw) != sorted(made.raw) or list(made.score) != sorted(made.score):
            raise CalibrationError(f"{path}: raw and score must ascend")
        return made


def fit(raw: Seq[float], good: Seq[bool], uncalibrated: Seq[float]) -> Calibration:
    """Fit on labelled samples. CalibrationError for too few, or only one kind of label."""
    if len(raw) < MIN_SAMPLES or all(good) or not any(good):
        raise CalibrationError(f"at least {MIN_SAMPLES} samples, good and bad ones, are needed, not {len(raw)}")
    order = np.argsort(raw, kind="stable")
    x, y = np.asarray(raw, float)[order], np.asarray(good, float)[order]
    from scipy.optimize import isotonic_regression  # half a second of imports, which only fitting needs

    levels = isotonic_regression(y).x
    knots_x, knots_y = [], []
    for start in np.flatnonzero(np.diff(levels, prepend=-1.0)):  # one knot amid each level
        block = levels == levels[start]
        knots_x.append(float(x[block].mean()))
        knots_y.append(float(levels[start] * 100))
    if len(knots_x) == 1:
        knots_x, knots_y = [float(x[0]), float(x[-1])], [knots_y[0]] * 2
    before = float(np.mean((np.asarray(uncalibrated, float)[order] / 100 - y) ** 2))
    after = float(np.mean((np.interp(x, knots_x, knots_y) / 100 - y) ** 2))
    return Calibration(tuple(knots_x), tuple(knots_y), len(x), after, before)
