"""One request from start to end: up the cascade until an answer stands."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType

from opentelemetry import context as otel_context
from opentelemetry.trace import INVALID_SPAN, Span, StatusCode, Tracer, format_trace_id

from router_service.admission.admission_queue import AdmissionQueue, Places
from router_service.clients.judge_client import JudgeClient, Verdict
from router_service.domain.events import (
    Accepted,
    Escalated,
    EscalationReason,
    Finished,
    InstanceChanged,
    Judged,
    RouterEvent,
    RouterRequest,
    TierAdmitted,
    TierStarted,
    TierSummary,
)
from router_service.domain.failures import FailureHistory
from router_service.generation import cascade
from router_service.generation.cascade import Escalate
from router_service.generation.live_requests import LiveRequests
from router_service.generation.tier_generation import TierDone, TierGeneration
from router_service.telemetry.late_traces import LateTraces, PastRequest, PastSpan
from router_service.telemetry.sampling import WindowSampler
from router_service.telemetry.stats import RouterStats
from services import telemetry
from services.domain.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    NotFound,
    Overloaded,
    PenstockError,
    PromptTooLong,
    Unavailable,
    UnsupportedByModel,
    invalid,
)
from services.domain.mesh_view import MeshView
from services.domain.plans import Plan, TierPlan
from services.domain.requests import ChatPrompt, GenerationRequest, SamplingParams, TokenFrame, TokenUsage
from services.domain.tools import NO_TOOLS, ToolUse
from services.tool_calls import FORMATS, parse_reply

OnAnswer = Callable[[str, TokenFrame], None]
"""Takes the parts of an answer that stands and the tier they are of, on the event loop, each behind all events before it."""

UNSTREAMED_INTERVAL_S = 0.25
"""How long tokens of a reply that nobody reads before its end may wait at the worker for others. What is lost of them when a
worker dies is computed again."""


@dataclass(slots=True)
class _Reply:
    """What a tier has said so far.

    held: for the judge; its frames are kept. answered_at: when the first token was passed on.
    """

    tier: TierPlan
    started_at: float
    span: Span
    held: bool
    with_logprobs: bool
    on_answer: OnAnswer
    instance_id: str = ""
    frames: list[TokenFrame] = field(default_factory=list)
    answered_at: float | None = None
    begun: bool = False
    prompt_tokens: int = 0
    tool_format: str = ""
    texts: list[str] | None = None  # of what is not held, where it may have calls
    done: TierDone | None = None
    score: float | None = None
    score_reason: str = ""
    accepted: bool = False
    failure: str = ""
    ended_at: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts or ()) or "".join(frame.text for frame in self.frames)

    def attributes(self) -> dict[str, str | float]:
        """Of its span."""
        optional = {"penstock.score": self.score, "penstock.threshold": self.tier.threshold}
        return {
            "penstock.tier": self.tier.name,
            "penstock.instance_id": self.instance_id,
            "penstock.accepted": self.accepted,
            **{name: value for name, value in optional.items() if value is not None},
        }

    def past(self) -> PastSpan:
        return PastSpan(_span_name(self.tier), self.started_at, self.ended_at, self.attributes(), self.failure)

    def take(self, frame: TokenFrame) -> None:
        """The next tokens: kept, or passed on as they come."""
        if not self.begun:
            self.begun = True
            self.span.add_event("first token")
        if self.held:
            self.frames.append(frame)
            return
        if self.texts is not None:
            self.texts.append(frame.text)
        self.answer(frame)

    def answer(self, frame: TokenFrame) -> None:
        """Pass tokens on as the client asked for them: without logprobs that only the judge wanted."""
        if self.answered_at is None and frame.token_ids:
            self.answered_at = asyncio.get_running_loop().time()
        if frame.logprobs and not self.with_logprobs:
            frame = replace(frame, logprobs=())
        self.on_answer(self.tier.name, frame)

    def usage(self) -> TokenUsage:
        told = self.done.usage if self.done is not None else TokenUsage()
        return told if told.prompt_tokens else replace(told, prompt_tokens=self.prompt_tokens)


class AdmittedRequests(AbstractAsyncContextManager[Places]):
    """Requests whose ids are live and that hold places of the queue, as long as the context lasts."""

    __slots__ = ("_live", "_live_ids", "_on_refused", "_places", "_queue", "_requests")

    def __init__(
        self,
        queue: AdmissionQueue,
        live: LiveRequests,
        requests: Sequence[RouterRequest],
        on_refused: Callable[[RouterRequest, PenstockError], None],
    ) -> None:
        self._queue, self._live, self._requests, self._on_refused = queue, live, requests, on_refused
        self._live_ids: list[str] = []
        self._places = queue.entered(requests[0].priority, requests[0].deadline_s, len(requests))

    async def __aenter__(self) -> Places:
        try:
            for request in self._requests:
                self._live.enter(request.request_id, resumes=request.resume is not None)
                self._live_ids.append(request.request_id)
            return await self._places.__aenter__()
        except BaseException as error:
            self._leave()
            if isinstance(error, (AlreadyRunning, Overloaded, DeadlineExceeded)):
                for request in self._requests:
                    self._on_refused(request, error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._places.__aexit__(kind, error, trace)
        self._leave()

    def _leave(self) -> None:
        for request_id in self._live_ids:
            self._live.leave(request_id)


class RequestDriver:
    """Drives requests; one for the whole router, holding nothing of any request but its id while it is live."""

    def __init__(
        self,
        view: MeshView,
        queue: AdmissionQueue,
        tiers: TierGeneration,
        judge: JudgeClient,
        stats: RouterStats,
        tracer: Tracer,
        late_traces: LateTraces,
        sampler: WindowSampler | None = None,
    ) -> None:
        self._view, self._queue, self._tiers, self._judge = view, queue, tiers, judge
        self._stats, self._tracer, self._late_traces, self._sampler = stats, tracer, late_traces, sampler
        self._live = LiveRequests()

    def refusal(self) -> Overloaded | None:
        """The error that a request is refused with which comes now, before anything of it is known; it is counted."""
        error = self._queue.refusal()
        if error is not None:
            self._stats.rejection()
        return error

    async def drive(self, request: RouterRequest, on_answer: OnAnswer) -> AsyncGenerator[RouterEvent, None]:
        """Admit one request and run it, as `admitted` and `run` do."""
        async with self.admitted([request]) as places, aclosing(self.run(request, places, on_answer)) as events:
            async for event in events:
                yield event

    def admitted(self, requests: Sequence[RouterRequest]) -> "AdmittedRequests":
        """Wait until requests that belong together, of one priority and deadline, may run: all of them or none.

        Entering it raises:
            AlreadyRunning: a request of one of these ids is live here, and this one does not resume it.
            InvalidRequest: they are more than can ever run at once; names `n`.
            Overloaded: the queue is full.
            DeadlineExceeded: while waiting.
        """
        return AdmittedRequests(self._queue, self._live, requests, self._count)

    async def run(
        self, request: RouterRequest, places: Places, on_answer: OnAnswer
    ) -> AsyncGenerator[RouterEvent, None]:
        """An admitted request's events but the answer; Finished is the last.

        Leaving the iteration cancels everything within a step. One of `places` is given back at the end.
        on_answer: takes the answer; whoever it hands it to holds what the client has not read yet.

        Raises:
            NotFound: no such model.
            InvalidRequest, RequestFailed: a tier cannot serve the request.
            PoisonRequest: instances died while they worked on it.
            Overloaded, Unavailable, DeadlineExceeded: on the way.
        """
        loop = asyncio.get_running_loop()
        arrival_s = self._sampler.arrived(request) if self._sampler is not None else 0.0
        finished, replies, began, traced = False, list[_Reply](), loop.time(), telemetry.is_traced()

        def past() -> PastRequest:
            tiers = [reply.past() for reply in replies]
            return PastRequest(request.request_id, request.model, began, loop.time(), tiers)

        try:
            async with aclosing(self._run_tiers(request, replies, past, on_answer)) as events:
                async for event in events:
                    if loop.time() >= request.deadline_s and not isinstance(event, Finished):
                        raise DeadlineExceeded("the deadline passed while the client was reading")
                    self._stats.saw(event, request.model)
                    finished = isinstance(event, Finished)
                    if self._sampler is not None and isinstance(event, Finished):
                        self._sampler.finished(arrival_s, request, event)
                    yield event
        except (asyncio.CancelledError, GeneratorExit):  # its client left, or its deadline passed on the way to it
            if not finished:
                self._stats.cancellation(request.model)
                if not traced:
                    self._late_traces.ended(loop.time() - began, past)
            raise
        except Exception as error:
            if isinstance(error, PenstockError):
                self._count(request, error)
            if not traced:
                self._late_traces.failed(past, error)
            raise
        finally:
            places.leave_one()

    def _count(self, request: RouterRequest, error: PenstockError) -> None:
        if isinstance(error, Overloaded):
            self._stats.rejection()
        else:
            self._stats.failure(request.model, error.reason.lower())

    async def _run_tiers(
        self,
        request: RouterRequest,
        replies: list[_Reply],
        past: Callable[[], PastRequest],
        on_answer: OnAnswer,
    ) -> AsyncGenerator[RouterEvent, None]:
        """Tier after tier, until an answer stands. The plan is the one that holds now, to the end of the request.

        replies: to be filled. past: the request as it is by now.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        plan = self._view.plan
        if plan is None:
            raise Unavailable("no plan has been published yet")
        route = cascade.route(plan, request.model)
        sampling = request.sampling.with_seed(secrets.randbits(63))
        assert sampling.seed is not None
        at = self._entry(plan, route, request)
        yield Accepted(request.request_id, plan.revision, sampling.seed)
        history = FailureHistory()
        while True:
            resumed = request.resume is not None and request.resume.tier == route[at].name
            held = cascade.judged_at(route, at) and not resumed  # what is resumed stood already
            reply = self._begin(route[at], request, on_answer, held=held)
            replies.append(reply)
            try:
                async with aclosing(self._reply(request, plan, sampling, reply, history)) as events:
                    async for event in events:
                        yield event
            except (Unavailable, PromptTooLong, UnsupportedByModel) as error:
                self._end(reply, error)
                escalation = cascade.unable(route, at, _why_unable(error)) if held else None
                if escalation is None:
                    raise
            except BaseException as error:
                self._end(reply, error)
                raise
            else:
                escalation = None
                if held:
                    verdict = await self._judged(request, plan, reply)
                    score = verdict.score if verdict is not None else None
                    decided = cascade.decide(plan, route, at, score)
                    escalation = decided if isinstance(decided, Escalate) else None
                    reply.score, reply.accepted = score, escalation is None
                    scorer = verdict.scorer if verdict is not None else plan.scorer
                    reply.score_reason = verdict.reason if verdict is not None else ""
                    yield Judged(
                        reply.tier.name,
                        score,
                        reply.tier.threshold or 0.0,
                        escalation is None,
                        scorer,
                        reply.score_reason,
                    )
                else:
                    reply.accepted = True
                self._end(reply)
            if escalation is not None:
                yield Escalated(route[at].name, route[escalation.to].name, escalation.reason)
                at = escalation.to
                continue
            if held:
                for frame in reply.frames:
                    reply.answer(frame)
            yield self._finished(request, reply, replies, began, past)
            return

    def _entry(self, plan: Plan, route: tuple[TierPlan, ...], request: RouterRequest) -> int:
        """Where the route begins: at its first tier, or at the one whose reply is resumed."""
        if request.resume is None:
            return 0
        for i, tier in enumerate(route):
            if tier.name == request.resume.tier:
                return i
        if plan.tier(request.resume.tier) is None:
            raise NotFound("tier", request.resume.tier)
        raise invalid("resume.tier", f"'{request.resume.tier}' is not on the way of model '{request.model[:80]}'")

    async def _reply(
        self,
        request: RouterRequest,
        plan: Plan,
        sampling: SamplingParams,
        reply: _Reply,
        history: FailureHistory,
    ) -> AsyncGenerator[RouterEvent, None]:
        """One tier's reply: its tokens are taken by `reply`."""
        resumed: tuple[int, ...] = ()
        if request.resume is not None and request.resume.tier == reply.tier.name:
            resumed = request.resume.token_ids
        if reply.held and sampling.top_logprobs is None and await self._judge.needs_logprobs(plan.scorer):
            sampling = replace(sampling, top_logprobs=0)
        asked = GenerationRequest(
            request_id=worker_request_id(request.request_id, reply.tier.name),
            prompt=request.prompt,
            sampling=sampling,
            resume_token_ids=resumed,
            slo=request.slo,
            priority=request.priority,
            output_interval_s=UNSTREAMED_INTERVAL_S if reply.held or not request.streamed else None,
        )
        parent = telemetry.context_of(reply.span)
        events = self._tiers.generate(
            reply.tier.name,
            asked,
            request.deadline_s,
            parent,
            on_tokens=reply.take,
            may_give_up=reply.held,
            history=history,
        )
        async with aclosing(events):
            async for event in events:
                match event:
                    case TierDone():
                        reply.done = event
                    case _:
                        if isinstance(event, TierStarted):
                            reply.instance_id = event.instance_id
                            reply.tool_format = self._tool_format(event.instance_id)
                        elif isinstance(event, InstanceChanged):
                            reply.instance_id = event.to_instance_id
                            count = self._stats.migration if event.moved else self._stats.failover
                            count(reply.tier.name)
                            name = "migration" if event.moved else "failover"
                            reply.span.add_event(name, {"penstock.offset": event.offset})
                        elif isinstance(event, TierAdmitted):
                            reply.prompt_tokens = event.prompt_tokens
                        yield event

    async def _judged(self, request: RouterRequest, plan: Plan, reply: _Reply) -> Verdict | None:
        assert reply.done is not None
        token = otel_context.attach(telemetry.context_of(reply.span))
        try:
            return await self._judge.score(
                plan.scorer,
                request.prompt,
                reply.text,
                reply.tier.name,
                reply.done.reason,
                [position for frame in reply.frames for position in frame.logprobs],
                request.deadline_s,
                reply.tool_format,
                request.sampling.structured_output,
            )
        finally:
            otel_context.detach(token)

    def _tool_format(self, instance_id: str) -> str:
        """How an instance's model writes tool calls; empty where it takes no tools, or is not known any more."""
        record = self._view.find(instance_id)
        return record.model.tool_format if record is not None and record.model is not None else ""

    def _begin(self, tier: TierPlan, request: RouterRequest, on_answer: OnAnswer, *, held: bool) -> _Reply:
        span = self._tracer.start_span(_span_name(tier)) if telemetry.is_traced() else INVALID_SPAN
        with_logprobs = request.sampling.top_logprobs is not None
        reply = _Reply(tier, asyncio.get_running_loop().time(), span, held, with_logprobs, on_answer)
        if _tool_use(request).offered:
            resumed = request.resume is not None and request.resume.tier == tier.name
            reply.texts = [request.resume.text] if request.resume is not None and resumed else []
        return reply

    def _end(self, reply: _Reply, error: BaseException | None = None) -> None:
        reply.ended_at = asyncio.get_running_loop().time()
        if error is not None:
            reply.failure = str(error) if isinstance(error, PenstockError) else "cancelled"
        if not reply.span.is_recording():
            return
        if reply.failure:
            reply.span.set_status(StatusCode.ERROR, reply.failure)
        reply.span.set_attributes(reply.attributes())
        reply.span.end()

    def _finished(
        self,
        request: RouterRequest,
        reply: _Reply,
        replies: list[_Reply],
        began: float,
        past: Callable[[], PastRequest],
    ) -> Finished:
        assert reply.done is not None
        form = FORMATS.get(reply.tool_format) if _tool_use(request).offered else None
        parsed = parse_reply(reply.text, form, request.request_id) if form is not None else None
        total_s, span = asyncio.get_running_loop().time() - began, reply.span.get_span_context()
        traced = span.trace_flags.sampled
        trace_id = format_trace_id(span.trace_id) if traced else self._late_traces.ended(total_s, past)
        summaries = tuple(
            TierSummary(
                tier=r.tier.name,
                model=r.tier.model,
                instance_id=r.instance_id,
                score=r.score,
                threshold=r.tier.threshold,
                accepted=r.accepted,
                usage=r.usage(),
                time_s=r.ended_at - r.started_at,
                score_reason=r.score_reason,
            )
            for r in replies
        )
        return Finished(
            reason=reply.done.reason,
            tier=reply.tier.name,
            usage=reply.usage(),
            tiers=summaries,
            ttft_s=reply.answered_at - began if reply.answered_at is not None else None,
            total_s=total_s,
            trace_id=trace_id,
            stop=reply.done.stop,
            tool_calls=parsed.calls if parsed is not None else (),
            content=parsed.content if parsed is not None else None,
        )


def _tool_use(request: RouterRequest) -> ToolUse:
    return request.prompt.tool_use if isinstance(request.prompt, ChatPrompt) else NO_TOOLS


def _why_unable(error: PenstockError) -> EscalationReason:
    """Why a tier could not answer, by the error of its last attempt."""
    match error:
        case PromptTooLong():
            return EscalationReason.PROMPT_TOO_LONG
        case UnsupportedByModel():
            return EscalationReason.UNSUPPORTED_BY_MODEL
    return EscalationReason.TIER_UNAVAILABLE


def _span_name(tier: TierPlan) -> str:
    return f"tier {tier.name}"


def worker_request_id(request_id: str, tier: str) -> str:
    """The name of a request's reply by one tier; each attempt at a worker has a name of its own that begins with it."""
    return f"{request_id}:{tier}"
