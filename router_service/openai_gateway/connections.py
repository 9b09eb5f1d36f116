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
from aiohttp.web_urldispatcher import PlainResource, UrlMappingMatchInfo

from router_service.openai_gateway.bodies import first_line
from router_service.openai_gateway.connection_limits import LimitedRunner
from router_service.openai_gateway.errors import plain_error, refusal

MAX_REQUEST_LINE_BYTES = 8 * 1024
MAX_HEADER_BYTES = 16 * 1024
MAX_HEADERS = 128
LINGER_S = 2.0
"""How long a refused connection is read, ignoring the data, so that its peer can read the answer."""

_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class GatewayRunner(LimitedRunner):
    """Serves an application over such connections, at most `max_connections`."""

    def __init__(self, app: web.Application, max_connections: int, **options: Any) -> None:
        self._options = options | {
            "max_line_size": MAX_REQUEST_LINE_BYTES,
            "max_field_size": MAX_HEADER_BYTES,
            "max_headers": MAX_HEADERS,
        }
        super().__init__(app, max_connections, **self._options)

    async def _make_server(self) -> web.Server:
        usual = await super()._make_server()
        handler = _by_fixed_path(self.app, usual.request_handler)
        return _Server(_guarded(handler), request_factory=usual.request_factory, loop=usual._loop, **self._options)


class _Server(web.Server):
    def __init__(self, handler: _Handler, **options: Any) -> None:
        own = ("request_factory", "handler_cancellation", "loop")
        super().__init__(handler, **options)
        self._connection_options = {key: value for key, value in options.items() if key not in own}

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._connection_options)


def _by_fixed_path(app: web.Application, handler: _Handler) -> _Handler:
    """An application's handler, without the look-up of the route for a request whose path is that of a route.

    aiohttp compares each path with patterns, makes an object for the match, and wraps the handler in middlewares, of which
    this application has one. All else (a query, an escaped path, an Expect header) takes its usual way.
    """
    (middleware,) = app.middlewares
    guard: Any = middleware
    routes = {}
    for route in app.router.routes():
        if isinstance(route.resource, PlainResource):
            match = UrlMappingMatchInfo({}, route)
            match.add_app(app)
            match.freeze()
            routes[route.method, route.resource.canonical] = route.handler, match

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        direct = routes.get((request.method, request.raw_path))
        if direct is None or "Expect" in request.headers or not isinstance(request, web.Request):
            return await handler(request)
        serve, request._match_info = direct
        response: web.StreamResponse = await guard(request, serve)
        return response

    return handle


def _guarded(handler: _Handler) -> _Handler:
    """The handler, with HTTP errors that no middleware sees (a bad Expect header) in OpenAI's format."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return refusal(request, error)

    return handle


class _Connection(RequestHandler):
    __slots__ = ("_peer_ended", "_refused")

    def __init__(self, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._refused = False
        self._peer_ended = asyncio.Event()

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
