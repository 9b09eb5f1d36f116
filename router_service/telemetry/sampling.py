"""Samples finished requests, window after window, for a planner that watches for drift. No prompt text is kept."""

import random
from collections import deque
from dataclasses import replace

from penstock.router_service.domain.events import RouterRequest, is_cascade_workload
from penstock.router_service.telemetry.batched_writes import BatchedWrites
from penstock.services.clock import Clock
from penstock.services.domain.plans import CASCADE_MODEL
from penstock.services.domain.workload import PARTS, RequestRecord, TierVisit, Window
from penstock.services.state.workload import WorkloadStore
from penstock.types.events import Finished

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

    def arrived(self, request: RouterRequest) -> None:
        """Count a request that has arrived now."""
        now = self._clock.wall()
        self._roll(now)
        if request.model == CASCADE_MODEL:
            part = int((now - self._start_s) / self._window_s * PARTS)
            self._arrivals[min(PARTS - 1, max(0, part))] += 1

    def finished(self, request: RouterRequest, event: Finished) -> None:
        """Sample a request that has ended now."""
        now = self._clock.wall()
        self._roll(now)
        if not is_cascade_workload(request, event):
            return
        self._seen += 1
        place = len(self._records) if len(self._records) < self._size else self._random.randrange(self._seen)
        if place < self._size:
            visits = tuple(TierVisit(t.tier, t.usage.output_tokens, t.score) for t in event.tiers)
            predicted = tuple((tier, round(score, 2)) for tier, score in event.predicted.items())
            self._records[place:] = [
                RequestRecord(now - event.total_s, event.tiers[0].usage.prompt_tokens, visits, predicted=predicted),
                *self._records[place + 1 :],
            ]

    def closed(self) -> list[Window]:
        """The windows that have ended since the last call, oldest first."""
        self._roll(self._clock.wall())
        closed = list(self._closed)
        self._closed.clear()
        return closed

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


class WorkloadReporter(BatchedWrites[Window]):
    """Writes windows to Redis when they end."""

    def __init__(self, sampler: WindowSampler, store: WorkloadStore) -> None:
        what = "windows of sampled requests"
        super().__init__("workload-reporter", what, lambda batch: store.append(*batch), batch=1, held=HELD_WINDOWS)
        self._sampler = sampler

    async def _write_once(self) -> None:
        for window in self._sampler.closed():
            self.add(window)
        await super()._write_once()
