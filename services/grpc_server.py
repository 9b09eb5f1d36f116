"""A gRPC server that accepts many new calls per turn of the event loop.

`grpc.aio` requests one new call at a time from the core, and each waits for all events of the active streams: with 200
busy streams, about 50 new calls are accepted per second. The core cancels calls that were not requested for 30 s (CANCELLED)
without any handler or counter seeing them. This server keeps many requests for calls pending at the core.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, cast

from grpc import aio
from grpc._cython import cygrpc
from grpc.aio import _server as grpc_aio_server

from penstock.services import open_files
from penstock.services.mesh_schema.router import MeshRouter

_log = logging.getLogger(__name__)

ACCEPTS = 64
"""Calls that the core may deliver at once: about 20 ms of work for the event loop if all are refused."""

# Calls pending in the core, usually few. These limits keep the core from cancelling them.
QUEUE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.server_max_unrequested_time_in_server", 600),  # s; the default of 30 is less than many deadlines
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 16_384),
)


MAX_STREAMS = 4096
"""Active calls per connection: far more than are admitted, so that the admission queue sees every call."""


def client_limits(router: MeshRouter) -> tuple[tuple[str, int], ...]:
    """Options of a server that clients connect to."""
    connections = open_files.connections(router.max_connections)
    return (
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_connection_idle_ms", round(router.connection_idle_s * 1000)),
        ("grpc.max_allowed_incoming_connections", connections),
    )


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    """The server loop of grpc.aio awaits `_request_call` for each new call; here, calls are already waiting."""

    async def _request_call(self) -> Any:
        calls = self.__dict__.get("calls")
        if calls is None:
            calls = self.calls = asyncio.Queue[Any]()
            self.accepting = [asyncio.ensure_future(self._accept()) for _ in range(ACCEPTS)]
        call = await calls.get()
        if isinstance(call, BaseException):
            raise call
        return call

    async def _accept(self) -> None:
        """Request calls from the core until the server stops."""
        try:
            while True:
                self.calls.put_nowait(await cygrpc.AioServer._request_call(self))
        except Exception as error:  # usually the server has stopped; the server loop reports it
            self.calls.put_nowait(error)


class Server(grpc_aio_server.Server):
    """Like the server of `grpc.aio.server()`, with many requests for calls pending at the core."""

    def __init__(self, interceptors: Sequence[aio.ServerInterceptor], options: Sequence[tuple[str, int | str]]) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _AioServer(self._loop, None, (), tuple(interceptors), (*options, *QUEUE_OPTIONS), None)

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        """Do nothing: the generic handlers, which generated code also adds, serve the same methods."""


def server(interceptors: Sequence[aio.ServerInterceptor], options: Sequence[tuple[str, int | str]]) -> aio.Server:
    """Create a server; the one of grpcio if this release does not have the private API used here."""
    if not hasattr(cygrpc.AioServer, "_request_call"):  # a private name, which a later release may not have
        _log.warning("this grpcio accepts one new call at a time: bursts of calls may be delayed")
        return aio.server(interceptors=tuple(interceptors), options=(*options, *QUEUE_OPTIONS))
    grpc_server: Any = Server(interceptors, options)
    return cast("aio.Server", grpc_server)
