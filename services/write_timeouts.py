"""Ends what waits too long for a peer that does not read.

A peer that stops reading shuts flow control, and whoever writes to it waits, without end unless somebody looks. A timer for
each write would cost more than most writes; here one sweep looks at all that are under way.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType

from services.domain.errors import PeerNotReading

SWEEPS = 4  # in one time-out: a write ends at most a quarter of it late
MAX_SWEEP_S = 1.0  # and at most so much after its deadline

write_deadline_s: ContextVar[float] = ContextVar("write_deadline_s", default=math.inf)
"""Where a request has a deadline of its own, no write of this context outlasts it. In the event loop's time."""


class WriteTimeouts:
    """Watches the writes of this event loop; `on_timeout` is called for each one that is ended."""

    def __init__(self, timeout_s: float, on_timeout: Callable[[], None] = lambda: None) -> None:
        self.timeout_s, self._on_timeout = timeout_s, on_timeout
        self._interval_s = min(timeout_s / SWEEPS, MAX_SWEEP_S)
        self._under_way: dict[WatchedWrites, tuple[float, asyncio.Task[object]]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def watched(self) -> "WatchedWrites":
        """For one stream: a context to enter around each write, as often as there are writes.

        Raises:
            PeerNotReading: from the context, if the write has lasted too long.
        """
        return WatchedWrites(self)

    def begin(self, write: "WatchedWrites") -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._under_way[write] = (min(loop.time() + self.timeout_s, write_deadline_s.get()), task)
        if self._sweep is None:
            self._sweep = loop.call_later(self._interval_s, self._look)

    def end(self, write: "WatchedWrites") -> None:
        self._under_way.pop(write, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        late = [(write, task) for write, (until_s, task) in self._under_way.items() if until_s <= loop.time()]
        for write, task in late:
            del self._under_way[write]
            write.timed_out = True
            task.cancel()
            self._on_timeout()
        self._sweep = loop.call_later(self._interval_s, self._look) if self._under_way else None


class WatchedWrites(AbstractContextManager[None]):
    """The writes of one stream, one at a time."""

    def __init__(self, timeouts: WriteTimeouts) -> None:
        self._timeouts = timeouts
        self.timed_out = False

    def __enter__(self) -> None:
        self._timeouts.begin(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timeouts.end(self)
        if self.timed_out and isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            assert task is not None
            if task.uncancel() == 0:  # else somebody else has cancelled the task as well
                raise PeerNotReading(
                    f"the peer has not read for {self._timeouts.timeout_s:g} s, or until the deadline"
                ) from None
