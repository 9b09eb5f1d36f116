"""Measures the throughput of tokens."""

from collections import deque

WINDOW_S = 5.0
TALLIES = 50  # per window: tokens closer together share a tally


class Throughput:
    """Tokens per second over the last five seconds, or since the start. Times are of a monotonic clock."""

    def __init__(self, now: float) -> None:
        self.restart(now)

    def restart(self, now: float) -> None:
        """Start the measurement again."""
        self._began = now
        self._tallies: deque[tuple[float, int]] = deque()

    def add(self, tokens: int, now: float) -> None:
        if self._tallies and now - self._tallies[-1][0] < WINDOW_S / TALLIES:
            at, count = self._tallies[-1]
            self._tallies[-1] = (at, count + tokens)
            return
        self._tallies.append((now, tokens))
        while now - self._tallies[0][0] > WINDOW_S:
            self._tallies.popleft()

    def per_second(self, now: float) -> float:
        """The throughput. Has no side effects, because metrics read it from another thread."""
        tokens = sum(count for at, count in self._tallies.copy() if now - at <= WINDOW_S)
        return tokens / min(WINDOW_S, max(now - self._began, 1e-9))
