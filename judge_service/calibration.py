"""Maps raw scores to scores from 0 to 100: the share of good answers among those with that raw score.

Isotonic regression of labels on raw scores (Zadrozny and Elkan 2002): the monotone curve with the smallest squared error,
interpolated linearly between its steps. The only I/O is reading and writing the file.
"""

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

MIN_SAMPLES = 20


class CalibrationError(Exception):
    """The samples or the calibration file cannot be used."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A monotone curve through (raw[i], score[i]), constant beyond its ends. Both are ascending.

    samples: number of samples that it was fitted to. brier, brier_before: mean squared error of score / 100 on these samples,
    with and without calibration.
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
        """Read a calibration file.

        Raises:
            CalibrationError: It is not a calibration file.
        """
        try:
            data = json.loads(path.read_text())
            calibration = cls(
                tuple(data["raw"]), tuple(data["score"]), data["samples"], data["brier"], data["brier_before"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CalibrationError(f"{path}: {error!r}") from error
        if not calibration.raw or len(calibration.raw) != len(calibration.score):
            raise CalibrationError(f"{path}: raw and score must have the same length, at least 1")
        if list(calibration.raw) != sorted(calibration.raw) or list(calibration.score) != sorted(calibration.score):
            raise CalibrationError(f"{path}: raw and score must ascend")
        return calibration


def fit(raw: Seq[float], good: Seq[bool], uncalibrated: Seq[float]) -> Calibration:
    """Fit a calibration to labelled samples.

    Raises:
        CalibrationError: There are too few samples, or all have the same label.
    """
    if len(raw) < MIN_SAMPLES or all(good) or not any(good):
        raise CalibrationError(f"at least {MIN_SAMPLES} samples are needed, good and bad ones, not {len(raw)}")
    order = np.argsort(raw, kind="stable")
    x, y = np.asarray(raw, float)[order], np.asarray(good, float)[order]
    from scipy.optimize import isotonic_regression  # half a second of imports, which only fitting needs

    levels = isotonic_regression(y).x
    knots_x, knots_y = [], []
    for start in np.flatnonzero(np.diff(levels, prepend=-1.0)):  # one knot in the middle of each step
        block = levels == levels[start]
        knots_x.append(float(x[block].mean()))
        knots_y.append(float(levels[start] * 100))
    if len(knots_x) == 1:
        knots_x, knots_y = [float(x[0]), float(x[-1])], [knots_y[0]] * 2
    brier_before = float(np.mean((np.asarray(uncalibrated, float)[order] / 100 - y) ** 2))
    brier = float(np.mean((np.interp(x, knots_x, knots_y) / 100 - y) ** 2))
    return Calibration(tuple(knots_x), tuple(knots_y), len(x), brier, brier_before)
