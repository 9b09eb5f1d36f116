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
        """Changes nothing: metrics read it from a thread of their own."""
        made = sum(count for at, count in self._tallies.copy() if now - at <= WINDOW_S)
        return made / min(WINDOW_S, max(now - self._began, 1e-9))
