"""Joins parts of answers that come within a moment: not at all in a router that has time, the longer the busier it is.

What a write to a client costs, mostly in the kernel, is several times what a part of an answer costs otherwise. So where
this process has little time left, a client gets the same tokens in fewer pieces, each a bounded moment later, instead of all
clients getting theirs later and later.
"""

import asyncio
import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

MAX_WAIT_S = 0.04
"""Twice what a worker's own joining delays a token by at most, unless told otherwise: nobody sees it."""
IDLE_SHARE, BUSY_SHARE = 0.6, 0.9
"""Of the event loop's time: parts wait from the first on, and the longest from the second on."""
MEASURE_S = 0.1  # between two measurements
SMOOTHING = 0.3  # weight of the latest one: the wait must not swing with what it saves


def wait_s(busy: float) -> float:
    """How long parts wait at a load of the event loop, from 0 to 1."""
    return MAX_WAIT_S * min(1.0, max(0.0, (busy - IDLE_SHARE) / (BUSY_SHARE - IDLE_SHARE)))


class AnswerBatching:
    """Says whether parts of answers wait, and calls what sends them, for all answers of this process together."""

    def __init__(self, cpu_s: Callable[[], float] = time.thread_time) -> None:
        """cpu_s: CPU time of the event loop's thread."""
        self._cpu_s, self._loop = cpu_s, asyncio.get_running_loop()
        self._measured_s, self._measured_cpu_s = self._loop.time(), cpu_s()
        self._busy = 0.0
        self._wait_s = 0.0
        self._waiting: list[Callable[[], None]] = []

    def waits(self) -> bool:
        """Whether what comes now waits for more."""
        now = self._loop.time()
        if now - self._measured_s >= MEASURE_S:
            self._measure(now)
        return self._wait_s > 0 or bool(self._waiting)

    def add(self, send: Callable[[], None]) -> None:
        """Have `send` called soon, once, behind all that has been added before."""
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
            except Exception:  # a fault of ours: one answer's, not the others'
                _log.exception("parts of an answer could not be sent")
