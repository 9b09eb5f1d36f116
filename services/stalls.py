"""Measures suspensions of this process, so that it does not mistake them for silence of its peers.

When a process that was suspended (SIGSTOP, a suspended machine, heavy swapping) continues, all its timers have expired before
it has read what arrived meanwhile.
"""

import asyncio
import math
from typing import NoReturn

from penstock.services.background import BackgroundWork, Works
from penstock.services.ticks import tick

TICK_S = 0.25
STALL_S = 1.0  # a gap that exceeds a tick by more than this is a stall; delays of a busy loop are shorter
MIN_LOOK_S = 0.01  # shortest time between two scans of all listeners
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


class StallMonitor(BackgroundWork):
    """Measures the stalls of the running event loop, as long as the context lasts."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._meter = StallMeter(self._loop.time())

    def work(self) -> Works:
        return {"stall-monitor": self._run}

    def total_s(self) -> float:
        """Total of all stalls in seconds, including one that has just ended."""
        return self._meter.observe(self._loop.time())

    def silent_at_s(self, heard_s: float, silence_s: float, stalled_s: float) -> float:
        """When a peer last heard at `heard_s` will have been silent for `silence_s`. stalled_s: `total_s` at `heard_s`."""
        return self._meter.silent_at(heard_s, silence_s, stalled_s, self._loop.time())

    async def _run(self) -> NoReturn:
        while True:
            self._meter.observe(self._loop.time())
            await tick(TICK_S)


class Listener:
    """A peer that is watched for silence by a SilenceWatch.

    deadline_s: on the event loop's clock; stalls do not extend it. heard_s, stalled_s: when it was last heard, and the
    total of stalls then; the reader sets both from `SilenceWatch.now`.
    """

    __slots__ = ("deadline_s", "heard_s", "silence_s", "stalled_s")

    def __init__(self, silence_s: float, deadline_s: float) -> None:
        self.silence_s, self.deadline_s = silence_s, deadline_s
        self.heard_s = self.stalled_s = 0.0

    def on_silence(self) -> None:
        """The peer has been silent for `silence_s`."""
        raise NotImplementedError

    def on_deadline(self) -> None:
        """The deadline has passed."""
        raise NotImplementedError


class SilenceWatch:
    """Detects peers that are silent for too long, not counting stalls of this process, or that exceed a deadline.

    One timer serves all peers, so that a message needs no timer operation.
    """

    def __init__(self, stalls: StallMonitor) -> None:
        self._stalls, self._loop = stalls, asyncio.get_running_loop()
        self._listeners: set[Listener] = set()
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> tuple[float, float]:
        """The time and the total of stalls, for a peer that is heard now."""
        return self._loop.time(), self._stalls.total_s()

    def begin(self, listener: Listener) -> None:
        """Watch a peer, which counts as heard now, until `end`; at most one of its two methods is called, once."""
        listener.heard_s, listener.stalled_s = self.now()
        self._listeners.add(listener)
        self._look_at(min(listener.heard_s + listener.silence_s, listener.deadline_s))

    def end(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if not self._listeners and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at(self, when_s: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= when_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when_s, self._look)

    def _look(self) -> None:
        """Check all peers, and again when the first of them may be silent or late."""
        self._timer = None
        now, next_s = self._loop.time(), math.inf
        for listener in list(self._listeners):
            silent_at_s = listener.heard_s + listener.silence_s
            if now >= silent_at_s:
                silent_at_s = self._stalls.silent_at_s(listener.heard_s, listener.silence_s, listener.stalled_s)
            if now < min(silent_at_s, listener.deadline_s):
                next_s = min(next_s, silent_at_s, listener.deadline_s)
                continue
            self._listeners.discard(listener)
            if now >= listener.deadline_s:
                listener.on_deadline()
            else:
                listener.on_silence()
        if next_s < math.inf:
            self._look_at(max(next_s, now + MIN_LOOK_S))
