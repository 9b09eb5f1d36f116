"""Measures the throughput of output tokens and of prompts."""

from collections import deque

WINDOW_S = 5.0
TALLIES = 50  # per window: tokens closer together share a tally
KEPT_SHARE = 0.95  # of the measurement so far, at each step with prompts: the last 20 or so count


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


class PromptThroughput:
    """Tokens of prompts that the engine computes per second, over the last steps with prompts.

    Steps count by their tokens: long chunks show what the engine can do, and short ones mostly what a step costs.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts, and the time that it took."""
        if tokens < 1 or seconds <= 0:
            return
        self._tokens = KEPT_SHARE * self._tokens + float(tokens) * tokens
        self._seconds = KEPT_SHARE * self._seconds + seconds * tokens

    @property
    def per_second(self) -> float:
        """0 before the first prompt."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0
