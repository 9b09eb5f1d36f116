"""A gRPC server that takes many new calls in one turn of the event loop.

`grpc.aio` asks the core for one new call at a time, and each answer waits behind all the events of the streams under way.
With 200 busy streams that is about 50 new calls per second. What the core has held for 30 s without being asked for it, it
ends with CANCELLED: no handler has seen it and no counter has counted it. This server has many requests at the core.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, cast

from grpc import aio
from grpc._cython import cygrpc
from grpc.aio import _server as grpc_aio_server

from services import open_files
from services.settings import MeshRouter

_log = logging.getLogger(__name__)

ACCEPTS = 64
"""Calls that the core may hand over at once: about 20 ms of work for the event loop, if all are refused."""

# The core holds what it has not handed over yet: little, as a rule. The limits keep it from ending calls unseen.
QUEUE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.server_max_unrequested_time_in_server", 600),  # s; the default, 30, is less than many a deadline
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 16_384),
)


MAX_STREAMS = 4096
"""Calls under way on one connection: far more than are admitted, so that the admission queue sees each call."""


def client_limits(router: MeshRouter) -> tuple[tuple[str, int], ...]:
    """Options for a server that anybody may connect to."""
    connections = open_files.connections(router.max_connections)
    return (
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_connection_idle_ms", round(router.connection_idle_s * 1000)),
        ("grpc.max_allowed_incoming_connections", connections),
    )


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    """grpc.aio's server loop, which awaits `_request_call` for each new call; here it finds them ready."""

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
        """Ask the core for one call after the other, until the server stops."""
        try:
            while True:
                self.calls.put_nowait(await cygrpc.AioServer._request_call(self))
        except Exception as error:  # the server has stopped, as a rule: for the server loop to say
            self.calls.put_nowait(error)


class Server(grpc_aio_server.Server):
    """As `grpc.aio.server()` makes it, with many requests for calls at the core."""

    def __init__(self, interceptors: Sequence[aio.ServerInterceptor], options: Sequence[tuple[str, int | str]]) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _AioServer(self._loop, None, (), tuple(interceptors), (*options, *QUEUE_OPTIONS), None)

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        """Do nothing: the generic handlers, which generated code adds as well, serve the same methods by the path above."""


def server(interceptors: Sequence[aio.ServerInterceptor], options: Sequence[tuple[str, int | str]]) -> aio.Server:
    """A server; one of grpc's own where this release of grpc is built otherwise than this module knows."""
    if not hasattr(cygrpc.AioServer, "_request_call"):  # a private name: absent from some release to come
        _log.warning("this grpcio takes one new call at a time: many at once may have to wait")
        return aio.server(interceptors=tuple(interceptors), options=(*options, *QUEUE_OPTIONS))
    made: Any = Server(interceptors, options)
    return cast("aio.Server", made)
