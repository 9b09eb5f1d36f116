"""Heartbeats of replies that have no output for a while, whatever their engine is doing."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

SWEEPS = 4  # per interval: a heartbeat is late by at most a quarter


class Silent(Protocol):
    """A reply. sent_s: time of its last output, on the monotonic clock."""

    sent_s: float

    def heartbeat(self) -> None: ...


class Heartbeats:
    """Has each open reply send a heartbeat after `interval_s` without output; one timer for all."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._open: set[Silent] = set()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def of(self, reply: Silent) -> Iterator[None]:
        """The reply is open as long as the context lasts."""
        self._open.add(reply)
        if self._timer is None:
            self._wait()
        try:
            yield
        finally:
            self._open.discard(reply)
            if not self._open and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s / SWEEPS, self._sweep)

    def _sweep(self) -> None:
        self._wait()
        silent_since_s = time.monotonic() - self._interval_s
        for reply in [reply for reply in self._open if reply.sent_s <= silent_since_s]:
            reply.heartbeat()
