"""HTTP connections that answer malformed HTTP requests in OpenAI's format, too.

aiohttp answers such faults itself, in plain text and before any middleware, and closes the connection at once: if bytes are
still on their way, the reset of the connection overtakes the answer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11
from aiohttp.http_exceptions import BadStatusLine, LineTooLong
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from penstock.router_service.openai_gateway.bodies import first_line
from penstock.router_service.openai_gateway.errors import plain_error, refusal

MAX_REQUEST_LINE_BYTES = 8 * 1024
MAX_HEADER_BYTES = 16 * 1024
MAX_HEADERS = 128
LINGER_S = 2.0
"""How long a refused connection is read, ignoring the data, so that its peer can read the answer."""

_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class GatewayRunner(web.AppRunner):
    """Serves an application over at most `max_connections` such connections; more are closed at once."""

    def __init__(self, app: web.Application, max_connections: int, **options: Any) -> None:
        limits = {
            "max_line_size": MAX_REQUEST_LINE_BYTES,
            "max_field_size": MAX_HEADER_BYTES,
            "max_headers": MAX_HEADERS,
            "auto_decompress": False,  # on the event loop, and whatever comes out: `bodies` bounds it
        }
        self._options = options | limits
        self._max_connections = max_connections
        super().__init__(app, **self._options)

    async def _make_server(self) -> web.Server:
        usual = await super()._make_server()
        handler, factory = _guarded(usual.request_handler), usual.request_factory
        server = _Server(handler, request_factory=factory, loop=usual._loop, **self._options)
        server.max_connections = self._max_connections
        return server

    def close_idle(self) -> None:
        """Close each connection: at once if it has no active request, otherwise after the response."""
        if self._server is not None:
            self._server.pre_shutdown()


class _Server(web.Server):
    max_connections: int

    def __call__(self) -> RequestHandler:
        return _Connection(self, self.max_connections, loop=self._loop, **self._kwargs)


def _guarded(handler: _Handler) -> _Handler:
    """The handler, with HTTP errors that no middleware sees (a bad Expect header) in OpenAI's format."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return refusal(request, error)

    return handle


class _Connection(RequestHandler):
    __slots__ = ("_most", "_peer_ended", "_refused")

    def __init__(self, server: web.Server, most: int, **options: Any) -> None:
        super().__init__(server, **options)
        self._most, self._refused = most, False
        self._peer_ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        assert self._manager is not None
        if len(self._manager.connections) >= self._most:  # those that were accepted together are counted one by one
            transport.abort()
        else:
            super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return  # after a fault, the boundaries of requests are not known
        count = len(self._messages)
        super().data_received(data)
        for i in range(count, len(self._messages)):
            message, payload = self._messages[i]
            if not isinstance(message, _ErrInfo) and message.version not in (HttpVersion10, HttpVersion11):
                error = BadStatusLine(error="only HTTP/1.0 and HTTP/1.1 are served here")
                message = _ErrInfo(400, error, error.message)
                self._messages[i] = message, payload
            if isinstance(message, _ErrInfo):
                self._refused = True
                self._break_body(first_line(message.exc))
                break

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Refuse a body that ends too early; end the request of a peer that left."""
        self._peer_ended.set()
        return self._break_body("it ends too early")

    def _break_body(self, why: str) -> bool:
        """Fail the reading of an incomplete body; return whether there is one."""
        request = self._current_request
        if request is None or request.content.is_eof() or request.content.exception() is not None:
            return False
        request.content.set_exception(web.RequestPayloadError(why))
        return True

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to a malformed HTTP request, or to an internal error."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        if status >= 500:
            self.log_exception("a request failed", exc_info=exc)
            body = plain_error("internal error; see the log", "server_error", "internal")
        else:
            status, code = _status_of(exc)
            problem = first_line(exc) if exc is not None else "not an HTTP request"
            body = plain_error(f"request: {problem}", "invalid_request_error", code)
        self._refused = True
        response = web.json_response(body, status=status)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        broken = request.content.exception() is not None
        if broken:
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        if broken or (self._refused and not self._messages):
            self._refused = True
            await self._linger()
            request.content.feed_eof()
        return finished

    async def _linger(self) -> None:
        """Close our side, and read until the peer has closed its side."""
        transport = self.transport
        if transport is None or self._peer_ended.is_set():
            return
        with suppress(OSError, RuntimeError, TimeoutError):
            transport.write_eof()
            async with asyncio.timeout(LINGER_S):
                await self._peer_ended.wait()


def _status_of(error: BaseException | None) -> tuple[int, str]:
    """HTTP status and OpenAI's code for a fault in a request's head."""
    if isinstance(error, LineTooLong):
        return (414, "uri_too_long") if error.args[1] == MAX_REQUEST_LINE_BYTES else (431, "headers_too_large")
    if str(getattr(error, "message", "")).startswith("Too many headers"):
        return 431, "headers_too_large"
    return 400, "bad_request"
