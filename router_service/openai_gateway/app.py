"""The HTTP server: routes, streaming, errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from aiohttp import web
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode

import penstock
from router_service.admission.admission_queue import Places
from router_service.answer_batching import AnswerBatching
from router_service.clients.token_client import TokenClient
from router_service.domain.events import RequestOutput, RouterRequest
from router_service.domain.models import ServedModel, models_of
from router_service.generation.in_flight_requests import InFlightRequests
from router_service.generation.request_driver import RequestDriver
from router_service.openai_gateway import health, replies, response_headers, schema, whole_replies
from router_service.openai_gateway.bodies import RequestBodies
from router_service.openai_gateway.connections import GatewayRunner
from router_service.openai_gateway.errors import error_body, error_headers, plain_error, refusal
from router_service.openai_gateway.event_writer import EventWriter
from router_service.openai_gateway.health import HealthRoutes
from router_service.openai_gateway.idle_comments import COMMENT, IdleComments
from router_service.openai_gateway.json_values import json_bytes
from router_service.openai_gateway.objectives import in_own_field
from router_service.openai_gateway.reasoning import ReasoningOutput
from router_service.openai_gateway.replies import ChatFormat, Choice, CompletionFormat, Format
from router_service.openai_gateway.response_headers import ResponseHeaders
from router_service.openai_gateway.responses import ResponseFormat, ResponseRequest, StreamedResponse, parse_response
from router_service.openai_gateway.streamed_calls import StreamedCalls
from router_service.openai_gateway.streamed_replies import ChoiceOutput, StreamedReply
from router_service.openai_gateway.tokenization import TokenizationRoutes
from router_service.routing.readiness import readiness
from router_service.tenancy.tenancy import Admission, Tenancy
from services import telemetry
from services.access.certificates import LOOK_S, CertificateFiles, HttpCertificates
from services.background import end, supervise
from services.domain.errors import InvalidRequest, NotFound, PeerNotReading, PenstockError, invalid, shortened
from services.domain.instances import ModelCard
from services.domain.mesh_view import MeshView
from services.domain.plans import CASCADE_MODEL, Plan
from services.domain.requests import MAX_SEED, ChatPrompt, Prompt, SamplingParams
from services.domain.slo.promises import Promise
from services.errors import http_status
from services.mesh_schema import MeshSlo
from services.reasoning import ReasoningParser, reasoning_parser
from services.telemetry import Telemetry
from services.tool_calls import FORMATS, ToolFormat
from services.write_timeouts import WriteTimeouts, write_deadline_s

_log = logging.getLogger(__name__)

MAX_TRACED_PATH_CHARS = 256
MAX_WHOLE_LOGPROBS = 128
"""Logprobs per output position, of all choices together, that a reply may hold in memory until it is sent: 128 x 2,000
positions are some 100 MB."""
GZIP_BYTES = 16 * 1024
"""Replies from this size on are compressed for clients that accept it. Text is smaller, and would cost more time than it
saves; logprobs and many choices are larger."""
_JSON = {"Content-Type": "application/json; charset=utf-8"}
_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_NO_SPAN = nullcontext(INVALID_SPAN)
UNTRACED = "/v1/models"  # polled by clients: traces of it would push those of requests out
LINGERING_S = 1.0  # for the rest of a body that is not needed: time for the client to read the error


Request = schema.ChatRequest | schema.CompletionRequest | ResponseRequest
AnyFormat = Format | ResponseFormat


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits per client, and what it is sent besides replies: named as in the mesh file's `router`."""

    default_deadline_s: float
    write_timeout_s: float
    body_timeout_s: float
    keepalive_timeout_s: float
    max_connections: int
    heartbeat_s: float
    cors_origins: tuple[str, ...] = ()


class OpenAiGateway:
    """The routes under /v1 and those of health. They call the router's driver directly."""

    def __init__(
        self,
        driver: RequestDriver,
        tenancy: Tenancy,
        view: MeshView,
        draining: InFlightRequests,
        batching: AnswerBatching,
        measured: Telemetry,
        limits: HttpLimits,
        slo: MeshSlo,
        tokens: TokenClient,
    ) -> None:
        self._slo, self._tokens = slo, tokens
        self._driver, self._view, self._draining, self._batching = driver, view, draining, batching
        self._tenancy, self._measured, self._limits = tenancy, measured, limits
        given_up = measured.meter.create_counter("penstock.http.server.write_timeouts", unit="{request}")
        self._bodies = RequestBodies(limits.body_timeout_s)
        self._writes = WriteTimeouts(limits.write_timeout_s, lambda: given_up.add(1))
        self._headers = ResponseHeaders(limits.cors_origins)
        self._idle_comments = IdleComments(limits.heartbeat_s)
        self._runner: GatewayRunner | None = None
        self._site: web.TCPSite | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reasons: tuple[int, Plan, bool] | None = None  # of the view's version and plan: whether any tier reasons

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
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_get("/version", self._version)
        TokenizationRoutes(self._view, self._tokens, self._bodies, self._tenancy).add_to(app)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model}", self._model)
        HealthRoutes(lambda: readiness(self._view, draining=self._draining.closed)).add_to(app)
        self._runner = GatewayRunner(
            app,
            self._limits.max_connections,
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
                response = web.json_response(
                    plain_error("internal error; see the log", "server_error", "internal"), status=500
                )
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
        if request.path.startswith(UNTRACED) or not self._measured.is_traced(request.headers.get("traceparent")):
            return _NO_SPAN
        route = request.match_info.route.resource
        return self._measured.tracer.start_as_current_span(
            f"{request.method} {route.canonical if route is not None else 'unknown'}",
            context=telemetry.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": request.method, "url.path": _path(request)},
            record_exception=False,
            set_status_on_exception=False,
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [_model_body(m) for m in self._served_models()]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": penstock.__version__})

    async def _embeddings(self, request: web.Request) -> web.Response:
        problem = "no model of this mesh computes embeddings: tiers generate text"
        return web.json_response(plain_error(problem, "invalid_request_error", "model_not_found", "model"), status=404)

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        for model in self._served_models():
            if model.id == name:
                return web.json_response(_model_body(model))
        raise NotFound("model", name)

    def _served_models(self) -> list[ServedModel]:
        """The models that the caller may use."""
        return [model for model in models_of(self._view) if self._tenancy.allows_model(model.id)]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self._check_room()
        body = await self._bodies.parsed(request, schema.parse_chat)
        with_logprobs = bool(body.logprobs)
        try:
            return await self._answer(request, body, ChatFormat(), [body.prompt], body.params, with_logprobs)
        except InvalidRequest as error:
            raise body.in_own_fields(error) from error

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self._check_room()
        body = await self._bodies.parsed(request, schema.parse_completion)
        with_logprobs = body.logprobs is not None
        try:
            return await self._answer(request, body, CompletionFormat(), body.prompts(), body.params, with_logprobs)
        except InvalidRequest as error:
            raise body.in_own_fields(error) from error

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        self._check_room()
        body = await self._bodies.parsed(request, parse_response)
        try:
            return await self._answer(request, body, ResponseFormat(body), [body.chat], body.params, False)
        except InvalidRequest as error:
            raise body.in_own_fields(error) from error

    def _promise(self, body: Request) -> Promise | None:
        """What a request is promised from now on.

        Raises:
            InvalidRequest: It names an unknown class.
        """
        objectives = body.objectives()
        if objectives is None:
            return None
        try:
            return Promise.received(self._slo.resolved(objectives), asyncio.get_running_loop().time())
        except InvalidRequest as error:
            raise type(error)(*map(in_own_field, error.problems)) from error

    def _check_room(self) -> None:
        """Refuse a request before its body is read if the admission queue is full.

        Raises:
            Overloaded: It is full.
        """
        if (refusal := self._driver.refusal()) is not None:
            raise refusal

    async def _answer(
        self,
        request: web.Request,
        body: Request,
        shape: AnyFormat,
        prompts: list[Prompt],
        sampling: SamplingParams,
        with_logprobs: bool,
    ) -> web.StreamResponse:
        request_id = request[response_headers.REQUEST_ID]
        deadline_s = asyncio.get_running_loop().time() + self._limits.default_deadline_s
        write_deadline_s.set(deadline_s)
        choices = [
            Choice(index=p * body.choices() + i, prompt_index=p)
            for p in range(len(prompts))
            for i in range(body.choices())
        ]
        values = len(choices) * (1 + (sampling.top_logprobs or 0))
        if with_logprobs and not body.stream and values > MAX_WHOLE_LOGPROBS:
            raise invalid(
                "n",
                f"{len(choices)} choices with {sampling.top_logprobs or 0} more likely tokens each: a reply that is not "
                f"streamed may hold {MAX_WHOLE_LOGPROBS} logprobs per position",
            )
        promise = self._promise(body)
        requests = [
            RouterRequest(
                request_id=request_id if len(choices) == 1 else f"{request_id}-{choice.index}",
                model=body.model,
                prompt=prompts[choice.prompt_index],
                sampling=_nth(sampling, choice.index),
                deadline_s=deadline_s,
                promise=promise,
                streamed=bool(body.stream),
                prediction=body.predicted(),
                cache_salt=body.cache_salt or "",
            )
            for choice in choices
        ]
        with self._draining:
            if body.stream:
                async with self._tenancy.admitted(requests) as admission:
                    return await self._stream(request, body, shape, request_id, choices, admission)
            async with (
                self._tenancy.admitted(requests) as admission,
                self._driver.admitted(admission.requests) as places,
            ):
                requests = list(admission.requests)
                await _all(
                    [
                        admission.counted(
                            self._driver.run(each, places, self._separated(each, choice, choice.add_reasoning, shape))
                        )
                        for each, choice in zip(requests, choices, strict=True)
                    ]
                )
                replies.check_not_declined(choices)
        if isinstance(shape, ResponseFormat):
            (choice,) = choices
            form = self._tool_format(choice.finished.tier) if choice.finished is not None else None
            response = shape.whole(request_id, choice, form, _extension(request_id, choices))
            return _json_response(request, json_bytes(response), admission.headers)
        head = replies.envelope(shape, request_id, body.model, chunk=False)
        head |= {"usage": replies.usage(choices), "penstock": _extension(request_id, choices)}
        content = await whole_replies.encoded(shape, head, choices, logprobs=with_logprobs)
        return _json_response(request, content, admission.headers)

    async def _stream(
        self,
        request: web.Request,
        body: Request,
        shape: AnyFormat,
        request_id: str,
        choices: list[Choice],
        admission: Admission,
    ) -> web.StreamResponse:
        """Server-sent events.

        Headers are sent with the first event, or with a comment: once the request is queued, once a tier has admitted a
        request whose answer will be held, or after `heartbeat_s`. An error before that has its own status. A request with an
        SLO has only the last of these comments, so that the status can say that it is declined.
        """
        requests = list(admission.requests)
        response = web.StreamResponse(headers=_EVENT_STREAM | dict(admission.headers))
        async with EventWriter(request, response, self._writes, requests[0].deadline_s) as writer:
            self._idle_comments.watch(writer)
            prompt = requests[0].prompt
            offers_tools = isinstance(prompt, ChatPrompt) and bool(prompt.tool_use.offered)
            reply: StreamedReply | StreamedResponse
            if isinstance(shape, ResponseFormat):
                reply = StreamedResponse(
                    shape,
                    request_id,
                    choices[0],
                    writer.send,
                    self._tool_format,
                    lambda: _extension(request_id, choices),
                )
            else:
                options = body.stream_options
                reply = (partial(StreamedCalls, **self._calls(requests)) if offers_tools else StreamedReply)(
                    shape,
                    replies.envelope(shape, request_id, body.model, chunk=True),
                    choices,
                    writer.send,
                    self._batching,
                    lambda: _extension(request_id, choices),
                    logprobs=requests[0].sampling.top_logprobs is not None,
                    usage=isinstance(options, schema.StreamOptions) and options.include_usage,
                )

            held = self._held_tiers(requests[0])

            def begin() -> None:
                if not writer.begun:
                    writer.send(COMMENT)

            def queued() -> None:
                if requests[0].promise is None and any(m.id == body.model for m in models_of(self._view)):
                    begin()

            def admitted(tier: str) -> None:
                if tier in held:
                    begin()

            def run(index: int, each: RouterRequest, places: Places) -> Coroutine[Any, Any, None]:
                output = ChoiceOutput(reply, index, writer.sent, admitted)
                separated = self._separated(each, output, partial(reply.reasoning, index), shape)
                return admission.counted(self._driver.run(each, places, separated))

            try:
                async with self._driver.admitted(requests, queued) as places:
                    await _all([run(index, each, places) for index, each in enumerate(requests)])
                    replies.check_not_declined(choices)
                    await writer.end(reply.end())
            except PeerNotReading:
                raise
            except PenstockError as error:
                if not writer.begun:
                    raise
                admission.failed()
                reply.error(error_body(body.in_own_fields(error) if isinstance(error, InvalidRequest) else error))
                await writer.sent()
        return response

    def _held_tiers(self, request: RouterRequest) -> frozenset[str]:
        """Tiers whose answer to a request is held until it is judged. None for a request with an SLO: if it is declined, the
        status says so."""
        plan = self._view.plan
        if plan is None or request.model != CASCADE_MODEL or request.promise is not None:
            return frozenset()
        return frozenset(tier.name for tier in plan.tiers if tier.threshold is not None)

    def _calls(self, requests: list[RouterRequest]) -> dict[str, Any]:
        """The arguments of StreamedCalls about the requests of a stream's choices."""
        return {"request_ids": [request.request_id for request in requests], "tool_format": self._tool_format}

    def _tool_format(self, tier: str) -> ToolFormat | None:
        """How a tier's model writes tool calls; None if it is not known."""
        card = self._card(tier)
        return FORMATS.get(card.tool_format) if card is not None else None

    def _card(self, tier: str) -> ModelCard | None:
        """The model of a tier; None if no instance of it is known."""
        workers = [*self._view.workers(tier), *self._view.expired_workers(tier)]
        return next((worker.model for worker in workers if worker.model is not None), None)

    def _separated(
        self, request: RouterRequest, output: RequestOutput, on_reasoning: Callable[[str], None], shape: AnyFormat
    ) -> RequestOutput:
        """The output of a request whose reasoning goes to `on_reasoning`, where a tier's model has any."""
        plan = self._view.plan
        if plan is None or isinstance(shape, CompletionFormat) or not self._any_reasons(plan):
            return output

        def parser(tier: str) -> ReasoningParser | None:
            card = self._card(tier)
            name = card.reasoning_format if card is not None else ""
            return reasoning_parser(name, request.prompt, request.sampling)

        return ReasoningOutput(output, parser, on_reasoning)

    def _any_reasons(self, plan: Plan) -> bool:
        """Whether a model of the plan's tiers has a reasoning format; looked up again for a new view."""
        version, known = self._view.version, self._reasons
        if known is None or known[0] != version or known[1] is not plan:
            cards = [self._card(tier.name) for tier in plan.tiers]
            reasons = any(card is not None and card.reasoning_format for card in cards)
            known = self._reasons = version, plan, reasons
        return known[2]


def _json_response(request: web.Request, body: bytes, headers: Mapping[str, str]) -> web.Response:
    """A reply, compressed if it is large and the client can read that. Large ones are compressed off the event loop."""
    response = web.Response(body=body, headers=_JSON | dict(headers), zlib_executor_size=GZIP_BYTES)
    if len(body) >= GZIP_BYTES and "gzip" in request.headers.get("Accept-Encoding", ""):
        response.enable_compression(web.ContentCoding.gzip)
    return response


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


def _nth(sampling: SamplingParams, index: int) -> SamplingParams:
    """Parameters of one choice: each has its own random numbers, also under one seed."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + index * 0x9E3779B97F4A7C15) & MAX_SEED)


def _extension(request_id: str, choices: list[Choice]) -> Any:
    """One object, or a list if there are several choices."""
    extensions = [replies.extension(request_id, c.finished) for c in choices if c.finished is not None]
    return extensions[0] if len(choices) == 1 and extensions else extensions


def _model_body(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": 0,
        "owned_by": "penstock",
        "penstock": {
            "model": model.model,
            "cascade": model.cascade,
            "max_context_tokens": model.max_context_tokens,
        },
    }


async def _all(choices: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Run all choices of a reply concurrently to their ends. The first error ends them all."""
    if len(choices) == 1:
        await choices[0]
        return
    tasks = [asyncio.create_task(choice) for choice in choices]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await end(*tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # retrieved: only the first error is reported
