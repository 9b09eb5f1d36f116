"""Joins parts of answers that come within a short time, which is zero in a router that is not busy and grows with its load.

A write to a client, mostly in the kernel, costs several times what a part of an answer costs otherwise. So clients of a busy
process get the same tokens in fewer pieces, with a bounded delay, instead of all getting theirs later and later.
"""

import asyncio
import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

MAX_WAIT_S = 0.04
"""Twice the default limit of coalescing in a worker; too short to be noticed."""
IDLE_SHARE, BUSY_SHARE = 0.6, 0.9
"""Of the event loop's time: parts wait from the first share on, and longest from the second on."""
MEASURE_S = 0.1  # between two measurements
SMOOTHING = 0.3  # weight of the latest one: the delay must not oscillate with what it saves


def wait_s(busy: float) -> float:
    """How long parts wait. busy: load of the event loop, from 0 to 1."""
    return MAX_WAIT_S * min(1.0, max(0.0, (busy - IDLE_SHARE) / (BUSY_SHARE - IDLE_SHARE)))


class AnswerBatching:
    """Decides whether parts of answers wait, and calls the functions that send them, for all answers of this process."""

    def __init__(self, cpu_s: Callable[[], float] = time.thread_time) -> None:
        """cpu_s: CPU time of the event loop's thread."""
        self._cpu_s, self._loop = cpu_s, asyncio.get_running_loop()
        self._measured_s, self._measured_cpu_s = self._loop.time(), cpu_s()
        self._busy = 0.0
        self._wait_s = 0.0
        self._waiting: list[Callable[[], None]] = []

    def waits(self) -> bool:
        """Whether a part that comes now waits for others."""
        now = self._loop.time()
        if now - self._measured_s >= MEASURE_S:
            self._measure(now)
        return self._wait_s > 0 or bool(self._waiting)

    def add(self, send: Callable[[], None]) -> None:
        """Call `send` once when the wait is over, after all that were added before."""
        if not self._waiting:
            self._loop.call_later(self._wait_s, self._send_all)
        self._waiting.append(send)

    def _measure(self, now: float) -> None:
        cpu_s = self._cpu_s()
        busy = (cpu_s - self._measured_cpu_s) / (now - self._measured_s)
        self._busy += SMOOTHING * (busy - self._busy)
        self._measured_s, self._measured_cpu_s = now, cpu_s
        self._wait_s = wait_s(self._busy)

    def _send_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for send in waiting:
            try:
                send()
            except Exception:  # affects one answer only
                _log.exception("parts of an answer could not be sent")
