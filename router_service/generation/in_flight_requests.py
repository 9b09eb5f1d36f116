"""The active requests of this router, of all protocols."""

import asyncio
import secrets

from penstock.services.domain.errors import Unavailable


def new_request_id() -> str:
    """A unique id."""
    return f"req-{secrets.token_hex(12)}"


class InFlightRequests:
    """Counts active requests; refuses new ones when the router drains."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()
        self.closed = False
        """Whether new requests are refused."""

    def __enter__(self) -> None:
        if self.closed:
            raise Unavailable("this router is draining")
        self._count += 1
        self._none.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if self._count == 0:
            self._none.set()

    async def drained(self) -> None:
        """Refuse new requests; return when none is active."""
        self.closed = True
        await self._none.wait()
