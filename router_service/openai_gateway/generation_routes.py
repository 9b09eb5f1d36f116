"""The routes that generate: chat completions, completions, responses; whole or streamed."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from penstock.router_service.admission.rules import Ticket
from penstock.router_service.domain.events import RequestOutput, RouterEvent, RouterRequest
from penstock.router_service.generation.tier_answer import offers_tools
from penstock.router_service.openai_gateway import replies, response_headers, schema
from penstock.router_service.openai_gateway.bodies import RequestBodies
from penstock.router_service.openai_gateway.errors import error_body
from penstock.router_service.openai_gateway.event_writer import EventWriter
from penstock.router_service.openai_gateway.idle_comments import COMMENT, IdleComments
from penstock.router_service.openai_gateway.json_values import json_bytes
from penstock.router_service.openai_gateway.reasoning import ReasoningOutput
from penstock.router_service.openai_gateway.replies import ChatFormat, Choice, CompletionFormat, Format
from penstock.router_service.openai_gateway.responses.events import ResponseFormat, StreamedResponse
from penstock.router_service.openai_gateway.responses.schema import ResponseRequest
from penstock.router_service.openai_gateway.streamed_replies import StreamedReply
from penstock.router_service.openai_gateway.tools import ToolDeltas
from penstock.router_service.request_intake import RequestIntake
from penstock.router_service.tenancy.tenancy import TenantAdmission
from penstock.services.background import gathered
from penstock.services.domain.errors import InvalidRequest, PeerNotReading, PenstockError, SloDeclined, invalid
from penstock.services.domain.instances import ModelCard
from penstock.services.domain.plans import CASCADE_MODEL
from penstock.services.reasoning import ReasoningParser, reasoning_parser
from penstock.services.tool_calls.formats import FORMATS, ToolFormat
from penstock.services.write_timeouts import WriteTimeouts, write_deadline_s
from penstock.types.events import TierAdmitted
from penstock.types.plans import Plan
from penstock.types.prompts import ChatPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.sampling import MAX_SEED, SamplingParams

MAX_WHOLE_LOGPROBS = 128
"""Logprobs per output position, of all choices together, that a reply may hold in memory until it is sent: 128 x 2,000
positions are some 100 MB."""
GZIP_BYTES = 16 * 1024
"""Replies from this size on are compressed for clients that accept it. Text is smaller, and would cost more time than it
saves; logprobs and many choices are larger."""
_JSON = {"Content-Type": "application/json; charset=utf-8"}
_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}

Request = schema.ChatRequest | schema.CompletionRequest | ResponseRequest
AnyFormat = Format | ResponseFormat
Outputs = Iterable[tuple[RequestOutput, Callable[[str], None]]]
"""Of each request: its output, and what takes its reasoning."""

_Body = TypeVar("_Body", schema.ChatRequest, schema.CompletionRequest, ResponseRequest)


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """The output of the request of one choice of a stream.

    sent: returns when the client has read what was written. admitted: called with each tier that has admitted the request.
    """

    reply: StreamedReply | StreamedResponse
    index: int
    sent: Callable[[], Awaitable[None]]
    admitted: Callable[[str], None]

    def event(self, event: RouterEvent) -> None:
        if isinstance(event, TierAdmitted):
            self.admitted(event.tier)
        self.reply.event(self.index, event)

    def answer(self, tier: str, frame: TokenFrame) -> None:
        self.reply.answer(self.index, tier, frame)


class GenerationRoutes:
    """They call the router's driver directly."""

    def __init__(
        self, intake: RequestIntake, bodies: RequestBodies, writes: WriteTimeouts, idle_comments: IdleComments
    ) -> None:
        self._intake, self._view, self._driver = intake, intake.view, intake.driver
        self._bodies, self._writes, self._idle_comments = bodies, writes, idle_comments
        self._reasons: tuple[int, Plan, bool] | None = None  # of the view's version and plan: whether any tier reasons

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self._serving(schema.ChatRequest, lambda _: ChatFormat()))
        app.router.add_post("/v1/completions", self._serving(schema.CompletionRequest, lambda _: CompletionFormat()))
        app.router.add_post("/v1/responses", self._serving(ResponseRequest, ResponseFormat))

    def _serving(
        self, kind: type[_Body], shape: Callable[[_Body], AnyFormat]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler of an endpoint for requests of a kind. shape: of the reply to one."""

        async def handle(request: web.Request) -> web.StreamResponse:
            if (refusal := self._driver.refusal()) is not None:  # before its body is read
                raise refusal
            body = await self._bodies.parsed(request, partial(schema.checked, kind))
            try:
                return await self._answer(request, body, shape(body))
            except InvalidRequest as error:
                raise body.in_own_fields(error) from error

        return handle

    async def _answer(self, request: web.Request, body: Request, shape: AnyFormat) -> web.StreamResponse:
        request_id, prompts, sampling = request[response_headers.REQUEST_ID], body.prompts(), body.params
        with_logprobs = sampling.top_logprobs is not None
        deadline_s = asyncio.get_running_loop().time() + self._intake.limits.default_deadline_s
        write_deadline_s.set(deadline_s)
        count = len(prompts) * body.choices()
        choices = [Choice(index=i, prompt_index=i // body.choices()) for i in range(count)]
        values = len(choices) * (1 + (sampling.top_logprobs or 0))
        if with_logprobs and not body.stream and values > MAX_WHOLE_LOGPROBS:
            raise invalid(
                "n",
                f"{len(choices)} choices with {sampling.top_logprobs or 0} more likely tokens each: a reply that is not "
                f"streamed may hold {MAX_WHOLE_LOGPROBS} logprobs per position",
            )
        promise = self._intake.promise(body.objectives())
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
        with self._intake.in_flight:
            async with self._intake.tenancy.admitted(requests) as admission:
                if body.stream:
                    return await self._stream(request, body, shape, choices, admission)
                async with self._driver.admitted(admission.requests) as ticket:
                    outputs = [(choice, choice.add_reasoning) for choice in choices]
                    await self._run_all(ticket, admission, shape, choices, outputs)
        if isinstance(shape, ResponseFormat):
            response = shape.whole(request_id, choices[0], self._tool_format, _extension(request_id, choices))
            return _json_response(request, json_bytes(response), admission.headers)
        head = replies.envelope(shape, request_id, body.model, chunk=False)
        head |= {"usage": replies.usage(choices), "penstock": _extension(request_id, choices)}
        encode = partial(_whole, shape, head, choices, logprobs=with_logprobs)
        content = await self._bodies.in_thread(encode) if with_logprobs else encode()
        return _json_response(request, content, admission.headers)

    async def _run_all(
        self, ticket: Ticket, admission: TenantAdmission, shape: AnyFormat, choices: Sequence[Choice], outputs: Outputs
    ) -> None:
        """Run admitted requests to their end.

        Raises:
            SloDeclined: One of them was declined.
        """
        await gathered(
            *(
                admission.counted(self._driver.run(each, ticket, self._separated(each, output, on_reasoning, shape)))
                for each, (output, on_reasoning) in zip(admission.requests, outputs, strict=True)
            )
        )
        if any(choice.finished is not None and choice.finished.reason is FinishReason.DECLINED for choice in choices):
            raise SloDeclined()

    async def _stream(
        self, request: web.Request, body: Request, shape: AnyFormat, choices: list[Choice], admission: TenantAdmission
    ) -> web.StreamResponse:
        """Server-sent events.

        Headers are sent with the first event, or with a comment: once the request is queued, once a tier has admitted a
        request whose answer will be held, or after `heartbeat_s`. An error before that has its own status. A request with an
        SLO has only the last of these comments, so that the status can say that it is declined.
        """
        requests, request_id = admission.requests, request[response_headers.REQUEST_ID]
        response = web.StreamResponse(headers=_EVENT_STREAM | dict(admission.headers))
        async with EventWriter(request, response, self._writes, requests[0].deadline_s) as writer:
            self._idle_comments.watch(writer)
            extension = partial(_extension, request_id, choices)
            reply: StreamedReply | StreamedResponse
            if isinstance(shape, ResponseFormat):
                reply = StreamedResponse(shape, request_id, choices[0], writer.send, self._tool_format, extension)
            else:
                options = body.stream_options
                reply = StreamedReply(
                    shape,
                    replies.envelope(shape, request_id, body.model, chunk=True),
                    choices,
                    writer.send,
                    self._intake.batching,
                    extension,
                    logprobs=requests[0].sampling.top_logprobs is not None,
                    usage=options is not None and options.include_usage,
                    tools=partial(self._tool_deltas, requests) if offers_tools(requests[0]) else None,
                )
            held = self._held_tiers(requests[0])

            def begin() -> None:
                if not writer.begun:
                    writer.send(COMMENT)

            def queued() -> None:
                if requests[0].promise is None and any(m.id == body.model for m in self._intake.models()):
                    begin()

            def admitted(tier: str) -> None:
                if tier in held:
                    begin()

            outputs = [
                (ChoiceOutput(reply, index, writer.sent, admitted), partial(reply.reasoning, index))
                for index in range(len(choices))
            ]
            try:
                async with self._driver.admitted(requests, queued) as ticket:
                    await self._run_all(ticket, admission, shape, choices, outputs)
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

    def _tool_deltas(self, requests: Sequence[RouterRequest], index: int, tier: str) -> ToolDeltas | None:
        """What separates the calls of a tier's reply to one of these requests; None if its format is not known."""
        form, prompt = self._tool_format(tier), requests[index].prompt
        if form is None or not isinstance(prompt, ChatPrompt):
            return None
        return ToolDeltas(form, requests[index].request_id, prompt)

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


def _whole(shape: Format, head: replies.Json, choices: Sequence[Choice], *, logprobs: bool) -> bytes:
    """A reply as JSON: `head` with its choices."""
    return json_bytes(head | {"choices": [shape.choice(choice, logprobs=logprobs) for choice in choices]})


def _json_response(request: web.Request, body: bytes, headers: Mapping[str, str]) -> web.Response:
    """A reply, compressed if it is large and the client can read that. Large ones are compressed off the event loop."""
    response = web.Response(body=body, headers=_JSON | dict(headers), zlib_executor_size=GZIP_BYTES)
    if len(body) >= GZIP_BYTES and "gzip" in request.headers.get("Accept-Encoding", ""):
        response.enable_compression(web.ContentCoding.gzip)
    return response


def _nth(sampling: SamplingParams, index: int) -> SamplingParams:
    """Parameters of one choice: each has its own random numbers, also under one seed."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + index * 0x9E3779B97F4A7C15) & MAX_SEED)


def _extension(request_id: str, choices: list[Choice]) -> Any:
    """One object, or a list if there are several choices."""
    extensions = [replies.extension(request_id, c.finished) for c in choices if c.finished is not None]
    return extensions[0] if len(choices) == 1 and extensions else extensions
