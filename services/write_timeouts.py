"""Ends writes to peers that do not read.

When a peer stops reading, flow control blocks writes to it without limit. A timer per write would cost more than most writes,
so one periodic sweep checks all active writes.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType

from penstock.services.domain.errors import PeerNotReading

SWEEPS = 4  # per time-out: a write ends at most a quarter of it late
MAX_SWEEP_S = 1.0  # and at most this much after its deadline

write_deadline_s: ContextVar[float] = ContextVar("write_deadline_s", default=math.inf)
"""Deadline of the request of this context, in the time of the event loop; it also limits writes."""


class WriteTimeouts:
    """Watches the writes of this event loop. `on_timeout` is called for each write that is ended."""

    def __init__(self, timeout_s: float, on_timeout: Callable[[], None] = lambda: None) -> None:
        self.timeout_s, self._on_timeout = timeout_s, on_timeout
        self._interval_s = min(timeout_s / SWEEPS, MAX_SWEEP_S)
        self._under_way: dict[WatchedWrites, tuple[float, asyncio.Task[object]]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def watched(self) -> "WatchedWrites":
        """A context for the writes of one stream, to be entered for each write.

        Raises:
            PeerNotReading: On leaving the context, if the write took too long.
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
            if task.uncancel() == 0:  # otherwise another caller has also cancelled the task
                raise PeerNotReading(
                    f"the peer has not read for {self._timeouts.timeout_s:g} s, or until the deadline"
                ) from None
