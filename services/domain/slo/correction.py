"""Corrects predicted step times by measured ones, at a high quantile. No I/O.

A promise is never made on a mean: steps are predicted by the latency model times `factor`, the p95 of actual
over predicted time among the latest steps.
"""

from penstock.services.domain.slo.sliding_sample import SlidingSample

QUANTILE = 0.95
DEFAULT_WINDOW_STEPS = 256
"""At 20 steps per second a quarter of a minute: short enough to follow a machine that slows down, and a dozen samples lie
above the p95."""
MAX_AGE_S = 60.0
"""Of computing time: a slow model's 256 steps take minutes; a machine that slows down breaks every promise in that time."""
MIN_SAMPLES = 20
"""Fewer samples have no 95th percentile of their own: until then the greatest counts."""


class LatencyCorrection:
    """The quantile of actual over predicted step times, over the latest steps."""

    def __init__(self, window_steps: int = DEFAULT_WINDOW_STEPS) -> None:
        self._ratios, self._spent_s = SlidingSample(window_steps, MAX_AGE_S), 0.0

    def add(self, predicted_s: float, actual_s: float) -> None:
        """Add a step. predicted_s: by the latency model, without correction."""
        self._spent_s += actual_s
        if predicted_s > 0:
            self._ratios.add(actual_s / predicted_s, self._spent_s)

    @property
    def factor(self) -> float:
        """The factor for predicted step times; 1 before the first sample."""
        ratio = self._ratios.largest if len(self._ratios) < MIN_SAMPLES else self._ratios.quantile(QUANTILE)
        return 1.0 if ratio is None else ratio
