"""Measures suspensions of this process, so that it does not mistake them for silence of its peers.

When a process that was suspended (SIGSTOP, a suspended machine, heavy swapping) continues, all its timers have expired before
it has read what arrived meanwhile.
"""

import asyncio
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import NoReturn, TypeVar

from services.background import end, supervise

_Item = TypeVar("_Item")

TICK_S = 0.25
STALL_S = 1.0  # a gap that exceeds a tick by more than this is a stall; delays of a busy loop are shorter
GRACE_S = 1.0  # for reading what arrived during a stall, before any peer counts as silent


class StallMeter:
    """Adds up stalls from the times at which the process runs. No I/O; times are of a monotonic clock, in seconds."""

    def __init__(self, now: float) -> None:
        self._seen_s, self._total_s, self._woke_at_s = now, 0.0, float("-inf")

    def observe(self, now: float) -> float:
        """Record that the process is running; return the total of all stalls in seconds. Call at least every `TICK_S`."""
        gap_s, self._seen_s = now - self._seen_s, now
        if gap_s > TICK_S + STALL_S:
            self._total_s += gap_s
            self._woke_at_s = now
        return self._total_s

    def silent_at(self, since_s: float, silence_s: float, stalled_before_s: float, now: float) -> float:
        """When a peer last heard at `since_s` will have been silent for `silence_s`, not counting stalls of this process.

        stalled_before_s: Total of the stalls up to `since_s`.
        """
        stalled_s = self.observe(now) - stalled_before_s
        return max(since_s + silence_s + stalled_s, self._woke_at_s + GRACE_S if stalled_s else since_s)


class StallMonitor(AbstractAsyncContextManager["StallMonitor"]):
    """Measures the stalls of the running event loop, as long as the context lasts."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._meter = StallMeter(self._loop.time())
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "StallMonitor":
        self._meter.observe(self._loop.time())
        self._task = supervise("stall-monitor", self._run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            await end(self._task)

    def total_s(self) -> float:
        """Total of all stalls in seconds, including one that has just ended."""
        return self._meter.observe(self._loop.time())

    async def get(self, queue: "asyncio.Queue[_Item]", silence_s: float, deadline_s: float) -> _Item:
        """Return the next item of a queue. deadline_s: on the event loop's clock; stalls do not extend it.

        Raises:
            TimeoutError: Nothing arrived for `silence_s`, or the deadline has passed.
        """
        since_s, stalled_before_s = self._loop.time(), self.total_s()
        silent_at_s = since_s + silence_s
        while True:
            try:
                async with asyncio.timeout_at(min(silent_at_s, deadline_s)):
                    return await queue.get()
            except TimeoutError:
                now = self._loop.time()
                silent_at_s = self._meter.silent_at(since_s, silence_s, stalled_before_s, now)
                if now >= min(silent_at_s, deadline_s):
                    raise

    async def _run(self) -> NoReturn:
        while True:
            await asyncio.sleep(TICK_S)
            self._meter.observe(self._loop.time())
