"""Corrects predicted step times by measured ones, at a high quantile. No I/O.

A promise is never made on a mean: steps are predicted by the latency model times `factor`, the quantile (p95 by default) of
actual over predicted time among the latest steps.
"""

import bisect
from collections import deque

from services.domain.errors import invalid

DEFAULT_QUANTILE = 0.95
DEFAULT_WINDOW_STEPS = 256
"""At 20 steps per second a quarter of a minute: short enough to follow a machine that slows down, and a dozen samples lie
above the p95."""
MIN_SAMPLES = 20
"""Fewer samples have no 95th percentile of their own: until then the greatest counts."""


class LatencyCorrection:
    """The quantile of actual over predicted step times, over the latest steps."""

    def __init__(self, quantile: float = DEFAULT_QUANTILE, window_steps: int = DEFAULT_WINDOW_STEPS) -> None:
        if not 0 < quantile <= 1:
            raise invalid("latency_quantile", f"must be over 0 and at most 1, not {quantile}")
        if window_steps < MIN_SAMPLES:
            raise invalid("latency_window_steps", f"must be at least {MIN_SAMPLES}, not {window_steps}")
        self._quantile, self._window = quantile, window_steps
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, predicted_s: float, actual_s: float) -> None:
        """A step took `actual_s` where the latency model, without correction, said `predicted_s`."""
        if predicted_s <= 0:
            return
        ratio = actual_s / predicted_s
        self._latest.append(ratio)
        bisect.insort(self._sorted, ratio)
        if len(self._latest) > self._window:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]

    @property
    def samples(self) -> int:
        return len(self._latest)

    @property
    def factor(self) -> float:
        """What to multiply predicted step times by; 1 before the first sample."""
        if not self._sorted:
            return 1.0
        if len(self._sorted) < MIN_SAMPLES:
            return self._sorted[-1]
        rank = -(-int(self._quantile * 1e9) * len(self._sorted) // 10**9)  # nearest rank, in whole numbers
        return self._sorted[max(0, min(len(self._sorted), rank) - 1)]
