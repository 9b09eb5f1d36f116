"""The HTTP server: connections, keys, spans, errors, and the list of models."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NoReturn

from aiohttp import web
from opentelemetry.trace import Span, StatusCode

import penstock
from penstock.router_service.clients.worker_client import WorkerClient
from penstock.router_service.openai_gateway import health, response_headers
from penstock.router_service.openai_gateway.bodies import RequestBodies
from penstock.router_service.openai_gateway.connections import GatewayRunner
from penstock.router_service.openai_gateway.errors import error_body, error_headers, plain_error, refusal
from penstock.router_service.openai_gateway.generation_routes import GenerationRoutes
from penstock.router_service.openai_gateway.idle_comments import IdleComments
from penstock.router_service.openai_gateway.response_headers import ResponseHeaders
from penstock.router_service.openai_gateway.tokenization import TokenizationRoutes
from penstock.router_service.request_intake import RequestIntake
from penstock.router_service.routing.readiness import readiness
from penstock.services import open_files
from penstock.services.access.certificates import LOOK_S, CertificateFiles, HttpCertificates
from penstock.services.background import end, supervise
from penstock.services.domain.errors import NotFound, PeerNotReading, PenstockError
from penstock.services.errors import http_status
from penstock.services.telemetry import NO_SPAN, Telemetry
from penstock.services.write_timeouts import WriteTimeouts
from penstock.types.mesh_status import ServedModel
from penstock.types.problems import shortened

_log = logging.getLogger(__name__)

MAX_TRACED_PATH_CHARS = 256
UNTRACED = "/v1/models"  # polled by clients: traces of it would push those of requests out
LINGERING_S = 1.0  # for the rest of a body that is not needed: time for the client to read the error


class OpenAiGateway:
    """All routes of a router, at one port."""

    def __init__(self, intake: RequestIntake, measured: Telemetry, workers: WorkerClient) -> None:
        self._intake, self._tenancy, self._limits = intake, intake.tenancy, intake.limits
        self._measured, self._workers, limits = measured, workers, intake.limits
        given_up = measured.meter.create_counter("penstock.http.server.write_timeouts", unit="{request}")
        self._bodies = RequestBodies(limits.body_timeout_s)
        self._writes = WriteTimeouts(limits.write_timeout_s, lambda: given_up.add(1))
        self._headers = ResponseHeaders(limits.cors_origins)
        self._idle_comments = IdleComments(limits.heartbeat_s)
        self._runner: GatewayRunner | None = None
        self._site: web.TCPSite | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._generation = GenerationRoutes(intake, self._bodies, self._writes, self._idle_comments)

    async def start(
        self, host: str, port: int, *, shared_port: bool = False, certificates: CertificateFiles | None = None
    ) -> int:
        """Listen; return the port. shared_port: other processes of this router listen there, too.

        Raises:
            OSError: The port is taken.
        """
        app = web.Application(middlewares=[self._guard])
        app.on_response_prepare.append(self._headers.prepare)
        self._tasks.append(supervise("idle-comments", self._idle_comments.run))
        self._generation.add_to(app)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_get("/version", self._version)
        TokenizationRoutes(self._intake.view, self._workers, self._bodies, self._tenancy).add_to(app)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model}", self._model)
        health.add_health_routes(app, lambda: readiness(self._intake.view, draining=self._intake.in_flight.closed))
        self._runner = GatewayRunner(
            app,
            open_files.connections(self._limits.max_connections),
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=self._limits.keepalive_timeout_s,
            lingering_time=LINGERING_S,
        )
        await self._runner.setup()
        context = None
        if certificates is not None:
            current = HttpCertificates(certificates)
            context = current.context
            self._tasks.append(supervise("http-certificates", partial(_refresh, current)))
        site = self._site = web.TCPSite(self._runner, host, port, reuse_port=shared_port, ssl_context=context)
        await site.start()
        bound: int = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        return bound

    async def stop_listening(self) -> None:
        """Accept no new connections, close idle ones, and each of the others after its current response."""
        if self._site is not None and self._runner is not None:
            await self._site.stop()
            self._runner.close_idle()

    async def close(self) -> None:
        await end(*self._tasks)
        if self._runner is not None:
            await self._runner.cleanup()
        self._bodies.close()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """A span around each request, and every error in OpenAI's format."""
        if request.path in health.PATHS:
            return await handler(request)
        response_headers.begin(request)
        with self._span(request) as span:
            try:
                if (preflight := self._headers.preflight(request)) is not None:
                    return preflight
                self._tenancy.authenticate({"authorization": request.headers.get("Authorization", "")})
                response = await handler(request)
            except PeerNotReading as error:
                raise _cut_off(request, span, error) from error
            except PenstockError as error:
                response = web.json_response(error_body(error), status=http_status(error), headers=error_headers(error))
            except web.HTTPException as error:
                response = refusal(request, error)
            except asyncio.CancelledError:
                span.set_status(StatusCode.ERROR, "the client left")
                raise
            except Exception as error:
                _log.exception("%s %s failed", request.method, _path(request))
                span.record_exception(error)
                body = plain_error("internal error; see the log", "server_error", "internal")
                response = web.json_response(body, status=500)
            span.set_attribute("http.response.status_code", response.status)
            if response.status >= 500:
                span.set_status(StatusCode.ERROR)
            try:
                with suppress(ConnectionError), self._writes.watched():  # aiohttp sees a lost connection by itself
                    await response.prepare(request)
                    await response.write_eof()
            except PeerNotReading as error:
                raise _cut_off(request, span, error) from error
            return response

    def _span(self, request: web.Request) -> AbstractContextManager[Span]:
        """The current span as long as the context lasts; INVALID_SPAN, without a context, if the request is not traced."""
        if request.path.startswith(UNTRACED):
            return NO_SPAN
        route = request.match_info.route.resource
        name = f"{request.method} {route.canonical if route is not None else 'unknown'}"
        attributes = {"http.request.method": request.method, "url.path": _path(request)}
        return self._measured.server_span(name, request.headers, attributes)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [_model_body(m) for m in self._intake.models()]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": penstock.__version__})

    async def _embeddings(self, request: web.Request) -> web.Response:
        problem = "no model of this mesh computes embeddings: tiers generate text"
        return web.json_response(plain_error(problem, "invalid_request_error", "model_not_found", "model"), status=404)

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        served = {model.id: model for model in self._intake.models()}
        if name not in served:
            raise NotFound("model", name, served)
        return web.json_response(_model_body(served[name]))


async def _refresh(certificates: HttpCertificates) -> NoReturn:
    """Take up new certificates."""
    while True:
        await asyncio.sleep(LOOK_S)
        certificates.refresh()


def _cut_off(request: web.Request, span: Span, error: PeerNotReading) -> asyncio.CancelledError:
    """Close the connection at once, without sending the rest; return the error that ends the handler."""
    span.set_status(StatusCode.ERROR, str(error))
    _log.info("%s %s: %s", request.method, request.path, error)
    if request.transport is not None:
        request.transport.abort()
    return asyncio.CancelledError()


def _path(request: web.Request) -> str:
    """The request's path, shortened for logs and spans."""
    return shortened(request.path, MAX_TRACED_PATH_CHARS)


def _model_body(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": 0,
        "owned_by": "penstock",
        "penstock": {"model": model.model, "cascade": model.cascade, "max_context_tokens": model.max_context_tokens},
    }
