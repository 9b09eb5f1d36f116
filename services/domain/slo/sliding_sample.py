"""The latest measurements and their quantiles. No I/O."""

import bisect
import math
from collections import deque

_PARTS = 10**9  # quantiles are ranks in whole numbers, so that 0.95 of 20 is 19


class SlidingSample:
    """The latest `window` values, without those older than `max_age_s`."""

    def __init__(self, window: int, max_age_s: float = math.inf) -> None:
        """max_age_s: on the clock of `add`."""
        self._window, self._max_age_s = window, max_age_s
        self._latest: deque[tuple[float, float]] = deque()  # (time, value)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float, now_s: float = 0.0) -> None:
        """Add a value measured now."""
        self._latest.append((now_s, value))
        bisect.insort(self._sorted, value)
        if len(self._latest) > self._window:
            self._remove_oldest()
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Forget values that are too old."""
        while self._latest and now_s - self._latest[0][0] > self._max_age_s:
            self._remove_oldest()

    def quantile(self, quantile: float) -> float | None:
        """The value of nearest rank; None without values. quantile: over 0 and at most 1."""
        if not self._sorted:
            return None
        rank = -(-int(quantile * _PARTS) * len(self._sorted) // _PARTS)
        return self._sorted[max(0, min(len(self._sorted), rank) - 1)]

    @property
    def largest(self) -> float | None:
        return self._sorted[-1] if self._sorted else None

    def above(self, value: float) -> list[float]:
        """The values greater than `value`, in ascending order."""
        return self._sorted[bisect.bisect_right(self._sorted, value) :]

    def _remove_oldest(self) -> None:
        _, value = self._latest.popleft()
        del self._sorted[bisect.bisect_left(self._sorted, value)]
