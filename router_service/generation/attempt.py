"""One attempt at a reply: at one instance, and at those that the reply moves to from there."""

import asyncio
import contextvars
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode, Tracer

from penstock.router_service.clients.worker_client import WorkerClient
from penstock.router_service.domain.failures import FailureHistory
from penstock.router_service.domain.reply_promise import ReplyPromise
from penstock.router_service.generation.reply_assembler import ReplyAssembler
from penstock.router_service.migration.bidding import MoveAgent
from penstock.router_service.migration.movable_reply import MovableReply, WorkerChanged
from penstock.router_service.routing.instance_pool import InstancePool
from penstock.services import telemetry
from penstock.services.background import end
from penstock.services.domain.errors import DeadlineExceeded, PenstockError
from penstock.services.domain.instances import InstanceRecord
from penstock.services.domain.slo.sliding_sample import SlidingSample
from penstock.services.mesh_schema.slo import MeshSlo
from penstock.types.events import TierAdmitted, TierDeclined
from penstock.types.mesh_status import ReplyMoved
from penstock.types.replies import FinishReason
from penstock.types.requests import MAX_REQUEST_ID_CHARS, Draft, GenerationRequest
from penstock.types.slo import SloClass, SloFallback
from penstock.types.values import replaced
from penstock.types.workers import Admitted, Declined, EngineFinished, MoveAdvice, NotMoved, WorkerEvent

METHOD = "penstock.worker.v1.WorkerService/Generate"  # the name of a reply in traces


class SloHops:
    """The instances of one tier that have declined one reply: which are asked to keep its SLO, and how long."""

    def __init__(self, limits: MeshSlo, fallback: SloFallback, now_s: float) -> None:
        self._limits, self._fallback, self._began_s = limits, fallback, now_s
        self.declined: set[str] = set()

    def is_declined(self, instance_id: str, now_s: float, *, begun: bool) -> bool:
        """Whether the reply ends as declined instead of trying this instance. begun: it has tokens, so it must end."""
        if self._fallback is not SloFallback.DECLINE or begun or not self.declined:
            return False
        return instance_id in self.declined or not self._may_try(len(self.declined), now_s)

    def gives_up_waiting(self, *, begun: bool) -> bool:
        """Whether the reply ends as declined if there is no place for it before its first token is due."""
        return self._fallback is SloFallback.DECLINE and not begun

    def asks_to_decline(self, others: int, now_s: float, *, begun: bool) -> bool:
        """Whether the next instance shall decline rather than serve the reply as best effort.

        others: further instances that have not declined.
        """
        if self._fallback is SloFallback.DECLINE and not begun:
            return True
        return others > 0 and self._may_try(len(self.declined) + 1, now_s)

    def _may_try(self, hop: int, now_s: float) -> bool:
        return hop <= self._limits.max_hops and now_s - self._began_s <= self._limits.hop_time_s


@dataclass(frozen=True, slots=True)
class TierReply:
    """One tier's reply to one request, over all attempts at it.

    deadline_s: on the event loop's clock. parent, spans: of the spans of attempts and moves. history: failures of the request
    in all tiers. promise: the SLO of the reply; None without one. may_give_up: see `TierGeneration.generate`.
    """

    request: GenerationRequest
    deadline_s: float
    parent: Context
    assembler: ReplyAssembler
    history: FailureHistory
    promise: ReplyPromise | None
    hops: SloHops
    spans: telemetry.SpanBudget
    may_give_up: bool

    @property
    def tokens(self) -> int:
        """Of the prompt, and of the output so far."""
        return self.assembler.prompt_tokens + len(self.assembler.token_ids)


@dataclass(frozen=True, slots=True)
class AttemptServices:
    """What all attempts of a router use. stalls: how long moves have stalled their replies."""

    pool: InstancePool
    workers: WorkerClient
    agent: MoveAgent
    tracer: Tracer
    stalls: "MoveStalls"


STALL_SAMPLES, STALL_QUANTILE = 64, 0.95
FIRST_STALL_S = 0.1
"""Expected of a move before any has been measured."""


class MoveStalls:
    """How long the last moves have stalled their replies."""

    def __init__(self) -> None:
        self._stalls = SlidingSample(STALL_SAMPLES)

    def add(self, outcome: ReplyMoved | NotMoved) -> None:
        if isinstance(outcome, ReplyMoved):
            self._stalls.add(outcome.stall_s)

    @property
    def expected_s(self) -> float:
        """The 95th percentile."""
        stall_s = self._stalls.quantile(STALL_QUANTILE)
        return FIRST_STALL_S if stall_s is None else stall_s


class Attempt:
    """Passes what workers send to the reply's assembler, and has the reply move where its worker advises it."""

    def __init__(
        self,
        services: AttemptServices,
        reply: TierReply,
        record: InstanceRecord,
        *,
        on_failure: Callable[[InstanceRecord, PenstockError], None],
        may_move: Callable[[], bool],
        declines: bool,
    ) -> None:
        """on_failure, may_move: see MovableReply.

        declines: the instance shall decline what it cannot keep of the promise; what is left of the promise travels.
        """
        assembler, self._may_move = reply.assembler, may_move
        self._services, self._tier_reply, self._assembler, self._promise = services, reply, assembler, reply.promise
        self._loop = asyncio.get_running_loop()
        self._slo = self._promise.remainder(self._loop.time()) if self._promise is not None else None
        request = replaced(
            reply.request,
            request_id=attempt_id(reply.request.request_id),
            resume_token_ids=tuple(assembler.token_ids),
            slo=self._slo,
            decline_unkept_slo=declines and self._slo is not None,
            draft=_draft_for(record, reply.request),
        )
        self._request_id = request.request_id
        attributes: dict[str, str | int | float] = {
            "rpc.system": "grpc",
            "rpc.method": METHOD,
            "server.address": record.address,
            "penstock.instance_id": record.instance_id,
            "penstock.offset": len(assembler.token_ids),
        }
        parent = reply.spans.take(reply.parent)
        self._span = telemetry.child_span(services.tracer, METHOD, attributes, parent=parent, kind=SpanKind.CLIENT)
        self._trace_context = telemetry.context_of(self._span, parent)
        self._context = contextvars.copy_context()  # of the request: events come in the context of the call's reader
        self._move: asyncio.Task[None] | None = None
        self.reply = MovableReply(
            services.workers,
            record,
            request,
            reply.deadline_s,
            telemetry.inject(self._trace_context),
            on_event=self._take,
            on_tokens=assembler.take,
            on_failure=on_failure,
            may_move=self._may_move_now,
            at_target=self._at_target,
        )

    async def run(self) -> EngineFinished:
        """The reply, from the assembler's position to its end, or that it is declined. Cancelling cancels it at the workers.

        Raises:
            PenstockError: The worker's error.
            DeadlineExceeded: The deadline passed.
        """
        try:
            if self._loop.time() >= self._tier_reply.deadline_s:
                raise DeadlineExceeded("the deadline passed")
            with self._services.pool.sending(self.reply.record.instance_id, self._tier_reply.tokens) as self._sent:
                finished = await self.reply.run()
            if finished.reason is not FinishReason.DECLINED:
                self._assembler.begin()
            return finished
        except PenstockError as error:
            self._span.set_status(StatusCode.ERROR, str(error))
            raise
        finally:
            if self._move is not None:
                await end(self._move)
            self._span.end()

    def _take(self, event: WorkerEvent | WorkerChanged) -> None:
        tier, instance_id = self._assembler.tier, self._assembler.instance_id
        match event:
            case Admitted():
                granted = None if self._promise is None else self._promise.granted(self._slo, slo_kept=event.slo_kept)
                standard, tokens, most = granted is SloClass.STANDARD, event.prompt_tokens, event.max_output_tokens
                self._assembler.admitted(TierAdmitted(tier, instance_id, standard, tokens, most, granted))
            case Declined():
                self._span.add_event("declined", {"penstock.reason": event.reason})
                self._assembler.declined(TierDeclined(tier, instance_id, event.reason))
            case MoveAdvice() if self._move is None or self._move.done():
                follow = self._follow(event)
                self._move = self._loop.create_task(follow, name="move", context=self._context)
            case WorkerChanged():
                target_id = event.record.instance_id
                self._sent.move(target_id)
                offset = len(self._assembler.token_ids)
                self._span.add_event("moved", {"penstock.to": target_id, "penstock.offset": offset})
                self._assembler.moved(target_id, event.why)

    async def _follow(self, advice: MoveAdvice) -> None:
        tier, context = self._assembler.tier, self._tier_reply.spans.take(self._trace_context)
        outcome = await self._services.agent.follow(tier, self.reply, self._request_id, advice, context)
        self._services.stalls.add(outcome)

    def _may_move_now(self) -> bool:
        now_s = self._loop.time()
        stall_s = self._services.stalls.expected_s
        return self._may_move() and (self._promise is None or self._promise.allows_stall(stall_s, now_s))

    def _at_target(self, request: GenerationRequest) -> GenerationRequest:
        """The request for the target of a move: with what is left of its promise, which a move must not cost it."""
        if self._promise is None:
            return request
        self._slo = self._promise.remainder(self._loop.time())
        promised = self._promise.slo_class is SloClass.STANDARD and self._slo is not None
        return replaced(request, slo=self._slo, decline_unkept_slo=promised)


def _draft_for(record: InstanceRecord, request: GenerationRequest) -> Draft | None:
    """The draft in the form that an instance, and those that the reply may move to from there, can use."""
    if request.draft is None or record.model is None or not record.model.takes_drafts:
        return None
    return request.draft.in_form_for(record.model.tokenizer_digest)


def attempt_id(reply_id: str) -> str:
    """The id of one attempt at a reply, at its worker and those that the attempt moves to.

    No other attempt has it, of this router or another: an attempt whose end has not reached its worker yet does not block the
    next one. It begins with the reply's id, truncated to the largest length of an id.
    """
    suffix = f":{secrets.token_hex(6)}"
    return f"{reply_id[: MAX_REQUEST_ID_CHARS - len(suffix)]}{suffix}"
