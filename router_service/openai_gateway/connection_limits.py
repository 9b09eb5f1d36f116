"""How many HTTP connections there may be."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web


class _Refused(asyncio.Protocol):
    """Closes its connection before anything is read from it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class LimitedRunner(web.AppRunner):
    """An AppRunner that has at most `max_connections`; more are closed at once."""

    __slots__ = ("_max_connections",)

    def __init__(self, app: web.Application, max_connections: int, **options: Any) -> None:
        super().__init__(app, **options)
        self._max_connections = max_connections

    @property
    def server(self) -> Any:
        """What makes a protocol for each new connection."""
        server = super().server
        if server is None:
            return None
        accept: Callable[[], asyncio.Protocol] = server

        def protocol() -> asyncio.Protocol:
            return _Refused() if len(server.connections) >= self._max_connections else accept()

        return protocol

    def close_idle(self) -> None:
        """Close each connection: at once if it has no active request, otherwise after the response."""
        if self._server is not None:
            self._server.pre_shutdown()
