"""Keeps arrivals and token counts of finished requests in Redis, for `penstock export-trace`. No prompt text is kept."""

import asyncio
import logging
from collections import deque
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import NoReturn

from router_service.domain.events import Finished, RouterRequest, is_cascade_workload
from services.background import end, supervise
from services.clock import Clock
from services.domain.workload import ServedRequest
from services.state import ServedRequestStore, StateUnavailable

_log = logging.getLogger(__name__)

WRITE_S = 1.0  # between two writes
BATCH = 1000  # requests per write
HELD_REQUESTS = 10_000  # while Redis is unavailable; older ones are dropped


class RequestRecorder(AbstractAsyncContextManager["RequestRecorder"]):
    """Records finished requests of the cascade. Requests to a single tier, resumed and declined ones are left out."""

    def __init__(self, store: ServedRequestStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._held: deque[ServedRequest] = deque(maxlen=HELD_REQUESTS)
        self._batch: tuple[ServedRequest, ...] = ()  # being written
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "RequestRecorder":
        self._task = supervise("request-recorder", self._write)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        await end(self._task)
        await self._write_once()

    def finished(self, request: RouterRequest, event: Finished) -> None:
        """Record a request that has ended now."""
        if not is_cascade_workload(request, event):
            return
        arrival_s = self._clock.wall() - event.total_s
        prompt_tokens = event.tiers[0].usage.prompt_tokens
        self._held.append(ServedRequest(arrival_s, prompt_tokens, event.usage.output_tokens, event.tier))

    async def _write(self) -> NoReturn:
        while True:
            await asyncio.sleep(WRITE_S)
            await self._write_once()

    async def _write_once(self) -> None:
        """Write what is held; keep it if Redis is unavailable."""
        try:
            while self._batch or self._held:
                if not self._batch:
                    self._batch = tuple(self._held.popleft() for _ in range(min(BATCH, len(self._held))))
                await self._store.append(self._batch)
                self._batch = ()
        except StateUnavailable as error:
            _log.warning("finished requests cannot be recorded yet: %s", error)
