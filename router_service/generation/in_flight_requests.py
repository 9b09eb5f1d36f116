"""The requests under way in this router, by whichever protocol they came."""

import asyncio
import secrets

from services.domain.errors import Unavailable


def new_request_id() -> str:
    """An id that no other request has."""
    return f"req-{secrets.token_hex(12)}"


class InFlightRequests:
    """Counts requests under way; refuses new ones once the router drains."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()
        self._closed = False

    def __enter__(self) -> None:
        if self._closed:
            raise Unavailable("this router is draining")
        self._count += 1
        self._none.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if self._count == 0:
            self._none.set()

    @property
    def closed(self) -> bool:
        """Whether new requests are refused."""
        return self._closed

    async def drained(self) -> None:
        """Take nothing new; return once nothing is under way."""
        self._closed = True
        await self._none.wait()
