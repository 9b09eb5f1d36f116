"""How many HTTP connections there may be."""

import asyncio
from typing import Any

from aiohttp import web


class _Admission(asyncio.Protocol):
    """Hands a new connection over to the server, or closes it before anything is read from it.

    Connections that come together are accepted together, before the first one counts: so each is counted when it is made.
    """

    def __init__(self, server: Any, most: int) -> None:
        self._server, self._most = server, most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if len(self._server.connections) >= self._most:
            transport.abort()
            return
        protocol: asyncio.Protocol = self._server()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


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
        return None if server is None else lambda: _Admission(server, self._max_connections)

    def close_idle(self) -> None:
        """Close each connection: at once if it has no active request, otherwise after the response."""
        if self._server is not None:
            self._server.pre_shutdown()
