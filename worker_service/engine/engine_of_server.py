"""What engines have in common whose server queues and computes their requests."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from penstock.services.domain.errors import AlreadyRunning, Overloaded, Unavailable
from penstock.worker_service.engine.throughput import Throughput

RETRY_S = 1.0
LEFT_S = 0.01

R = TypeVar("R")


class EngineOfServer(Generic[R]):
    """At most `limit` requests at once. A derived engine creates `_failure` when it starts."""

    steps = None
    _failure: asyncio.Future[BaseException]

    def __init__(self, limit: int) -> None:
        self._limit, self._closed = limit, False
        self._requests: dict[str, R] = {}
        """By id, in order of arrival."""
        self._throughput = Throughput(time.monotonic())
        self.preemptions = 0

    async def failed(self) -> BaseException:
        return await asyncio.shield(self._failure)

    async def abort(self, request_id: str) -> bool:
        raise NotImplementedError

    @contextmanager
    def _placed(self, request_id: str, request: R) -> Iterator[R]:
        """Register a request as long as the context lasts.

        Raises:
            Unavailable: The engine has stopped.
            AlreadyRunning: A request with this id is in the engine.
            Overloaded: The limit on requests is reached.
        """
        if self._closed:
            raise Unavailable("the engine has stopped")
        if request_id in self._requests:
            raise AlreadyRunning(request_id)
        if len(self._requests) >= self._limit:
            raise Overloaded(f"{len(self._requests)} requests are already running here", RETRY_S)
        self._requests[request_id] = request
        try:
            yield request
        finally:
            del self._requests[request_id]

    async def _abort_all(self) -> bool:
        """Abort all requests, take no more, and wait until they have left; False if that was done before."""
        if self._closed:
            return False
        self._closed = True
        for request_id in list(self._requests):
            with suppress(Unavailable):  # its stream has ended already
                await self.abort(request_id)
        while self._requests:
            await asyncio.sleep(LEFT_S)
        return True
