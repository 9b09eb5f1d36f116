"""Samples finished requests, window after window, for a planner that watches for drift. No prompt text is kept."""

import asyncio
import logging
import random
from collections import deque
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from types import TracebackType
from typing import NoReturn

from router_service.domain.events import EscalationReason, Finished, RouterRequest, is_cascade_workload
from services.background import end, supervise
from services.clock import Clock
from services.domain.plans import CASCADE_MODEL
from services.domain.workload import PARTS, RequestRecord, TierVisit, Window
from services.state import StateUnavailable, WorkloadStore

_log = logging.getLogger(__name__)

_REJECTED_EARLY = EscalationReason.REJECTED_EARLY.value
HELD_WINDOWS = 12  # while Redis is unavailable


class WindowSampler:
    """At most `size` finished requests of each window, all equally likely (Vitter's reservoir, algorithm R).

    Windows begin at multiples of `window_s` since the epoch, so those of all routers coincide. A request counts as arrived
    whatever its result, so load that cannot be served is included. Requests to a single tier are left out.
    """

    def __init__(self, size: int, window_s: float, clock: Clock, random_: random.Random) -> None:
        self._size, self._window_s, self._clock, self._random = size, window_s, clock, random_
        self._closed: deque[Window] = deque(maxlen=HELD_WINDOWS)
        self._whole = False  # it has seen only a part of the window in which it was started
        self._begin(clock.wall())

    @property
    def ends_in_s(self) -> float:
        return max(0.0, self._start_s + self._window_s - self._clock.wall())

    def arrived(self, request: RouterRequest) -> float:
        """Count a request; return its arrival time, for `finished`."""
        now = self._clock.wall()
        self._roll(now)
        if request.model == CASCADE_MODEL:
            part = int((now - self._start_s) / self._window_s * PARTS)
            self._arrivals[min(PARTS - 1, max(0, part))] += 1
        return now

    def finished(self, arrival_s: float, request: RouterRequest, event: Finished) -> None:
        self._roll(self._clock.wall())
        if not is_cascade_workload(request, event):
            return
        self._seen += 1
        place = len(self._records) if len(self._records) < self._size else self._random.randrange(self._seen)
        if place < self._size:
            visits = tuple(
                TierVisit(t.tier, t.usage.output_tokens, t.score, t.score_reason == _REJECTED_EARLY)
                for t in event.tiers
            )
            predicted = tuple((tier, round(score, 2)) for tier, score in event.predicted.items())
            self._records[place:] = [
                RequestRecord(arrival_s, event.tiers[0].usage.prompt_tokens, visits, predicted=predicted),
                *self._records[place + 1 :],
            ]

    def closed(self) -> deque[Window]:
        """Windows that have ended, oldest first; the caller removes those that it has written."""
        self._roll(self._clock.wall())
        return self._closed

    def _roll(self, now: float) -> None:
        if now < self._start_s + self._window_s:
            return
        if not self._whole:
            self._whole = True
            self._begin(now)
            return
        weight = self._seen / len(self._records) if self._records else 1.0
        records = tuple(replace(record, weight=weight) for record in self._records)
        self._closed.append(Window(self._start_s, self._window_s, tuple(self._arrivals), records))
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._start_s = now // self._window_s * self._window_s
        self._arrivals, self._records, self._seen = [0] * PARTS, list[RequestRecord](), 0


class WorkloadReporter(AbstractAsyncContextManager["WorkloadReporter"]):
    """Writes windows to Redis when they end."""

    def __init__(self, sampler: WindowSampler, store: WorkloadStore) -> None:
        self._sampler, self._store = sampler, store
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "WorkloadReporter":
        self._task = supervise("workload-reporter", self._report)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        await end(self._task)

    async def _report(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._sampler.ends_in_s + 0.001)
            windows = self._sampler.closed()
            try:
                while windows:
                    await self._store.append(windows[0])
                    windows.popleft()
            except StateUnavailable as error:
                _log.warning("a window of sampled requests cannot be written yet: %s", error)
