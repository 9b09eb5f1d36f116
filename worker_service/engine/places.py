"""The requests of an engine whose server queues and computes them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from penstock.services.domain.errors import AlreadyRunning, Overloaded, Unavailable

RETRY_S = 1.0
LEFT_S = 0.01

R = TypeVar("R")


class Places(Generic[R]):
    """At most `limit` requests at once. requests: by id, in order of arrival."""

    def __init__(self, limit: int) -> None:
        self._limit, self._closed = limit, False
        self.requests: dict[str, R] = {}

    @contextmanager
    def place(self, request_id: str, request: R) -> Iterator[R]:
        """Register a request as long as the context lasts.

        Raises:
            Unavailable: The engine has stopped.
            AlreadyRunning: A request with this id is in the engine.
            Overloaded: The limit on requests is reached.
        """
        if self._closed:
            raise Unavailable("the engine has stopped")
        if request_id in self.requests:
            raise AlreadyRunning(request_id)
        if len(self.requests) >= self._limit:
            raise Overloaded(f"{len(self.requests)} requests are already running here", RETRY_S)
        self.requests[request_id] = request
        try:
            yield request
        finally:
            del self.requests[request_id]

    async def close(self, abort: Callable[[str], Awaitable[object]]) -> bool:
        """Abort all requests, take no more, and wait until they have left; False if that was done before."""
        if self._closed:
            return False
        self._closed = True
        for request_id in list(self.requests):
            with suppress(Unavailable):  # its stream has ended already
                await abort(request_id)
        while self.requests:
            await asyncio.sleep(LEFT_S)
        return True
