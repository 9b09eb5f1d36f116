"""A limit on what happens over time. No I/O, no clock: times are handed in."""

BURST_S = 10.0
"""A bucket holds what comes in within so long: what happens first after a pause is all admitted."""


class TokenBucket:
    """Admits `per_s` a second on average, and `BURST_S` seconds' worth at once, at least one."""

    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s, self._most = per_s, max(1.0, per_s * BURST_S) if per_s else 0.0
        self._tokens, self._at_s = self._most, now_s

    def add(self, tokens: float) -> None:
        """Admit so many more."""
        self._tokens = min(self._most, self._tokens + tokens)

    def take(self, now_s: float) -> bool:
        """Whether one more is admitted now. A clock that is read late adds nothing."""
        self.add(max(0.0, now_s - self._at_s) * self._per_s)
        self._at_s = max(self._at_s, now_s)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
