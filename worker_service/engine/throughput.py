"""How fast tokens come."""

from collections import deque

WINDOW_S = 5.0
TALLIES = 50  # in a window: what comes closer together is counted as one


class Throughput:
    """Tokens per second over the last five, or since the start where that is shorter. Times are of any one steady clock."""

    def __init__(self, now: float) -> None:
        self.restart(now)

    def restart(self, now: float) -> None:
        """Count from now on."""
        self._began, self._sum = now, 0
        self._tallies: deque[tuple[float, int]] = deque()

    def add(self, tokens: int, now: float) -> None:
        self._sum += tokens
        if self._tallies and now - self._tallies[-1][0] < WINDOW_S / TALLIES:
            at, count = self._tallies[-1]
            self._tallies[-1] = (at, count + tokens)
        else:
            self._forget(now)
            self._tallies.append((now, tokens))

    def per_second(self, now: float) -> float:
        self._forget(now)
        return self._sum / min(WINDOW_S, max(now - self._began, 1e-9))

    def _forget(self, now: float) -> None:
        while self._tallies and now - self._tallies[0][0] > WINDOW_S:
            self._sum -= self._tallies.popleft()[1]
