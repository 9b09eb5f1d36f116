"""The bounded queue at the door: so many requests at once, so many waiting, the rest are told when to come again."""

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.domain.errors import DeadlineExceeded, Overloaded

RATE_WINDOW = 64  # requests that the estimate of the waiting time looks back on


class Gate:
    """Lets `max_active` requests in; `max_waiting` wait, by priority, then in order of arrival."""

    def __init__(self, max_active: int, max_waiting: int) -> None:
        self._max_active, self._max_waiting = max_active, max_waiting
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = 0
        self._left: deque[float] = deque(maxlen=RATE_WINDOW)  # when requests left
        self.active = 0
        self.rejected = 0

    @property
    def waiting(self) -> int:
        return sum(1 for *_, place in self._waiting if not place.done())

    @asynccontextmanager
    async def entered(self, priority: int, deadline_s: float) -> AsyncIterator[None]:
        """Hold a place as long as the context lasts. Overloaded (queue full), DeadlineExceeded (while waiting)."""
        await self._enter(priority, deadline_s)
        try:
            yield
        finally:
            self._leave()

    def retry_after_s(self, now: float) -> float:
        """When a place in the queue may be free: the queue's length over the rate at which requests have left."""
        if len(self._left) < 2 or now <= self._left[0]:
            return 1.0
        rate = len(self._left) / (now - self._left[0])
        return min(30.0, max(0.1, 1.0 / rate))

    async def _enter(self, priority: int, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self.active < self._max_active:
            self.active += 1
            return
        if self.waiting >= self._max_waiting:
            self.rejected += 1
            raise Overloaded(f"{self.waiting} requests are waiting already", self.retry_after_s(loop.time()))
        place: asyncio.Future[None] = loop.create_future()
        self._arrivals += 1
        heapq.heappush(self._waiting, (-priority, self._arrivals, place))
        try:
            async with asyncio.timeout_at(deadline_s):
                await place
        except TimeoutError:
            if place.done() and not place.cancelled():
                self._leave()
            raise DeadlineExceeded("the deadline passed while the request was waiting for its turn") from None
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        self._left.append(asyncio.get_running_loop().time())
        while self._waiting:
            *_, place = heapq.heappop(self._waiting)
            if not place.done():
                place.set_result(None)  # the place is handed on: `active` stays
                return
        self.active -= 1
