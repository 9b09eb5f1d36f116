"""Divides the time of an engine that does not tell what its steps hold among its requests. No I/O."""

from collections.abc import Callable


class BusyShare:
    """While n requests are in the engine, each of them uses an n-th of the time."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._count, self._at_s = 0, now_s()
        self._share_s = 0.0  # what a request that had been there from the beginning would have used

    def enter(self) -> float:
        """A request enters; returns what `leave` needs."""
        self._advance()
        self._count += 1
        return self._share_s

    def leave(self, entered: float) -> float:
        """The request that entered with `entered` leaves; returns the seconds it has used."""
        self._advance()
        self._count -= 1
        return self._share_s - entered

    def _advance(self) -> None:
        now_s = self._now_s()
        if self._count:
            self._share_s += (now_s - self._at_s) / self._count
        self._at_s = now_s
