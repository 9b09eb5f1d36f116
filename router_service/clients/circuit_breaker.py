"""Stops calls to an instance that does not answer (Nygard 2007, circuit breaker). No I/O and no clock."""

FAILURES_TO_OPEN = 3
"""In a row."""
MAX_OPEN_S = 10.0


class CircuitBreaker:
    """Closed: all calls may pass. Open: none may. Half-open, when the time is up: one may pass, and its result decides."""

    def __init__(self, open_s: float) -> None:
        """open_s: for how long it opens the first time; doubled by each failed probe, up to MAX_OPEN_S."""
        self._open_s = open_s
        self._failures = self._openings = 0
        self._open_until: float | None = None
        self._probing = False

    def allows(self, now_s: float) -> bool:
        """Whether a call may pass now."""
        if self._open_until is None:
            return True
        return now_s >= self._open_until and not self._probing

    def passed(self) -> None:
        """A call that `allows` let pass is sent; if half-open, it is the one that decides."""
        self._probing = self._open_until is not None

    def succeeded(self) -> None:
        """A call was answered: close."""
        self._failures = self._openings = 0
        self._open_until, self._probing = None, False

    def failed(self, now_s: float) -> None:
        """A call was not answered."""
        self._failures += 1
        probed, self._probing = self._probing, False
        if probed or self._failures >= FAILURES_TO_OPEN:
            open_s = min(self._open_s * 2.0**self._openings, MAX_OPEN_S)
            self._openings += 1
            self._open_until = now_s + open_s

    def refused(self, now_s: float, retry_after_s: float) -> None:
        """A call was refused with a time after which to try again: open until then."""
        self._probing = False
        self._open_until = now_s + min(max(retry_after_s, 0.0), MAX_OPEN_S)

    def ended(self) -> None:
        """A call has ended, with a result or without one."""
        self._probing = False
