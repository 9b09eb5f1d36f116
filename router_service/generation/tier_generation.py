"""One tier's reply to one request, whatever happens to the instances that compute it.

An instance that dies, goes silent or drains is replaced: the next one gets the prompt and the tokens so far, and goes on
at the same offset. Whoever reads the events sees every token once, in order. What each failure means is
defined in `domain/failures.py`; here it is carried out.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace

from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import SpanKind, StatusCode, Tracer

from router_service.clients.worker_client import (
    WorkerAdmitted,
    WorkerClient,
    WorkerDeclined,
    WorkerFinished,
)
from router_service.domain.events import InstanceChanged, TierAdmitted, TierDeclined, TierStarted
from router_service.domain.failures import (
    OF_THE_INSTANCE,
    RULES,
    ClientError,
    Cost,
    Failure,
    FailureHistory,
    InstanceFailed,
    TryBudget,
    classify,
)
from router_service.migration.bidding import MoveAgent
from router_service.migration.movable_reply import MovableReply, Moved, NotMoved, WorkerChanged
from router_service.routing.instance_pool import MIN_FULL_S, InstancePool
from router_service.routing.placement import Placed
from router_service.routing.prompt_length import PromptLengths
from services import telemetry
from services.background import end
from services.domain.errors import (
    DeadlineExceeded,
    NotFound,
    Overloaded,
    PenstockError,
    PoisonRequest,
    Unavailable,
)
from services.domain.instances import InstanceRecord
from services.domain.requests import (
    MAX_REQUEST_ID_CHARS,
    FinishReason,
    GenerationRequest,
    TokenFrame,
    TokenUsage,
)
from services.domain.stages.advice import MoveAdvice
from services.event_streams import OnTokens

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long one tier of one request is tried.

    tier_wait_s: for an instance to come (back) when the tier has none to try. max_attempts: instances tried in all.
    max_refusals: failures in all that cost no attempt. max_deaths: instances that may die of the request, over all tiers.
    """

    tier_wait_s: float
    max_attempts: int
    max_refusals: int
    max_deaths: int


@dataclass(frozen=True, slots=True)
class TierDone:
    """The reply is complete."""

    reason: FinishReason
    usage: TokenUsage
    stop: str | None


GenerationEvent = TierStarted | TierAdmitted | TierDeclined | InstanceChanged | TierDone


class ReplyAssembler:
    """Joins the frames of several instances into one reply; pure bookkeeping.

    token_ids: of the whole reply so far. begun: whether the instance that sends now has said that it has begun.
    """

    def __init__(self, token_ids: tuple[int, ...], on_tokens: OnTokens) -> None:
        self.token_ids, self._on_tokens = list(token_ids), on_tokens
        self.begun = False

    def take(self, frame: TokenFrame) -> None:
        """Pass the frame on, if it is the next one.

        Raises:
            InstanceFailed: Tokens are missing, come twice, or come before the instance has admitted the request.
        """
        if not self.begun:
            raise InstanceFailed(Failure.PROTOCOL_ERROR, "tokens before the request was admitted")
        if frame.offset != len(self.token_ids):
            message = f"a frame at {frame.offset}, where {len(self.token_ids)} was due"
            raise InstanceFailed(Failure.PROTOCOL_ERROR, message)
        self.token_ids += frame.token_ids
        self._on_tokens(frame)


class TierGeneration:
    """Generates at the instances of one tier."""

    def __init__(
        self,
        pool: InstancePool,
        workers: WorkerClient,
        agent: MoveAgent,
        tracer: Tracer,
        policy: RetryPolicy,
        meter: Meter,
    ) -> None:
        self._pool, self._workers, self._agent = pool, workers, agent
        self._tracer, self._policy = tracer, policy
        self._failures = meter.create_counter(
            "penstock.router.instance_failures",
            unit="{failure}",
            description="Attempts at workers that failed, by kind of failure.",
        )
        self._poison = meter.create_counter(
            "penstock.router.poison_requests",
            unit="{request}",
            description="Requests that were given up because instances died while they worked on them.",
        )
        self._lengths = PromptLengths()
        self._replies: dict[str, MovableReply] = {}

    async def generate(
        self,
        tier: str,
        request: GenerationRequest,
        deadline_s: float,
        parent: Context,
        *,
        on_tokens: OnTokens,
        may_give_up: bool,
        history: FailureHistory | None = None,
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Events of one reply but its tokens; TierDone is the last.

        on_tokens: takes the reply's frames, each token once, each frame behind all events before it.
        may_give_up: with no instance to try at the start, Unavailable at once instead of waiting for one.
        history: what the request has met with in other tiers.

        Raises:
            InvalidRequest, PromptTooLong, MessageTooLarge, RequestFailed: The request itself is at fault.
            PoisonRequest: Too many instances died while they worked on it.
            Overloaded: The tier's workers are full and refused too often.
            Unavailable, DeadlineExceeded: No instance could be tried, or all that were tried failed.
        """
        assembler, history = ReplyAssembler(request.resume_token_ids, on_tokens), history or FailureHistory()
        budget = TryBudget(self._policy.max_attempts, self._policy.max_refusals)
        current, avoid, why, most = "", "", "", None
        prompt_tokens = self._lengths.estimate(tier, request.prompt)
        while True:
            patient = not may_give_up or current != ""
            tokens = prompt_tokens + len(assembler.token_ids)
            prefix_holder = self._pool.prefix_affinity.where(tier, request.prompt)
            record = await self._place(
                tier, request.request_id, tokens, avoid, prefix_holder, deadline_s, patient=patient
            )
            assembler.begun, begun_at = False, len(assembler.token_ids)
            attempt = self._attempt(tier, record, request, assembler, deadline_s, parent, history)
            try:
                async with aclosing(attempt) as events:
                    async for event in events:
                        if not assembler.begun:
                            assembler.begun = True
                            yield self._greeting(tier, current, record.instance_id, assembler, why)
                            current = record.instance_id
                        if isinstance(event, InstanceChanged):
                            current, begun_at = event.to_instance_id, event.offset
                        if isinstance(event, TierAdmitted):
                            most, prompt_tokens = event.max_output_tokens, event.prompt_tokens
                            self._lengths.learn(tier, request.prompt, prompt_tokens)
                        if isinstance(event, TierDone):
                            self._pool.prefix_affinity.learn(tier, request.prompt, current)
                            self._pool.succeeded(current)
                        yield event
                        if isinstance(event, TierDone):
                            return
            except PenstockError as error:
                avoid = current if assembler.begun else record.instance_id
                new_tokens = len(assembler.token_ids) - begun_at
                failure = self._record_failure(tier, request.request_id, avoid, error, new_tokens, history)
                if RULES[failure].cost is Cost.END:
                    raise
                # It died between its last token and its end.
                if most is not None and len(assembler.token_ids) >= most:
                    yield TierDone(FinishReason.LENGTH, TokenUsage(0, 0, len(assembler.token_ids)), None)
                    return
                if history.is_poisonous(self._policy.max_deaths):
                    self._poison.add(1, {"penstock.tier": tier})
                    _log.warning(
                        "%s: given up, %d instances died while they had it", request.request_id, history.deaths
                    )
                    raise PoisonRequest(history.deaths) from error
                if isinstance(error, Overloaded):
                    self._pool.is_full(avoid, error.retry_after_s)
                    why = why or "full"
                else:
                    why = str(error)
                if failure is Failure.CALL_BROKEN:  # not at once again: the next call there may break as well
                    self._pool.is_full(avoid, MIN_FULL_S)
                if not budget.spend(failure):
                    if RULES[failure].client_error is ClientError.ITSELF:
                        raise
                    raise Unavailable(f"tier {tier}: no instance could complete it, the last one: {error}") from error

    async def move(self, request_id: str, target: InstanceRecord, why: str) -> Moved | NotMoved:
        """Have a reply under way go on at another instance of its tier; return once it does, or will not.

        request_id: as given to `generate`. why: for the client's InstanceChanged event. NotFound.
        """
        reply = self._replies.get(request_id)
        if reply is None:
            raise NotFound("reply under way", request_id)
        return await reply.move(target, why, starving=True)

    def _record_failure(
        self,
        tier: str,
        request_id: str,
        instance_id: str,
        error: PenstockError,
        new_tokens: int,
        history: FailureHistory,
    ) -> Failure:
        """Count a failure of an instance, and eject the instance if that follows."""
        failure = classify(error, leaving=self._pool.is_leaving(instance_id))
        self._failures.add(1, {"penstock.tier": tier, "penstock.failure": failure.value})
        _log.info("%s at %s: %s: %s", request_id, instance_id, failure.value, error)
        self._pool.record_failure(instance_id, request_id, history.record(failure, instance_id, new_tokens))
        return failure

    @staticmethod
    def _greeting(
        tier: str, before: str, now: str, assembler: ReplyAssembler, why: str
    ) -> TierStarted | InstanceChanged:
        """What the client is told when an instance begins to work for it."""
        if not before:
            return TierStarted(tier, now)
        return InstanceChanged(tier, before, now, len(assembler.token_ids), why)

    async def _place(
        self,
        tier: str,
        request_id: str,
        tokens: int,
        avoid: str,
        prefix_holder: str,
        deadline_s: float,
        *,
        patient: bool,
    ) -> InstanceRecord:
        """An instance, as soon as there is one. Unavailable (none within the patience), DeadlineExceeded."""
        loop, number = asyncio.get_running_loop(), self._pool.number()
        give_up_at = loop.time() + (self._policy.tier_wait_s if patient else 0.0)
        while True:
            found = self._pool.place(tier, request_id, tokens, avoid=avoid, prefix_holder=prefix_holder)
            if isinstance(found, Placed):
                return found.record
            now = loop.time()
            if now >= deadline_s:
                raise DeadlineExceeded(f"the deadline passed while tier {tier} had no place")
            if not found.full and now >= give_up_at:
                raise Unavailable(f"tier {tier} has no instance to try")
            until_s = deadline_s if now >= give_up_at else min(deadline_s, give_up_at)
            await self._pool.wait_for_place(tier, number, until_s)

    async def _attempt(
        self,
        tier: str,
        record: InstanceRecord,
        request: GenerationRequest,
        assembler: ReplyAssembler,
        deadline_s: float,
        parent: Context,
        history: FailureHistory,
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The reply's rest at one instance."""
        if asyncio.get_running_loop().time() >= deadline_s:
            raise DeadlineExceeded("the deadline passed")
        name = attempt_id(request.request_id)
        asked = replace(request, request_id=name, resume_token_ids=tuple(assembler.token_ids))
        begun_at = len(assembler.token_ids)

        def failed_meanwhile(failed: InstanceRecord, error: PenstockError) -> None:
            if classify(error) in OF_THE_INSTANCE:
                at_source = failed.instance_id == record.instance_id
                new_tokens = len(assembler.token_ids) - begun_at if at_source else 0
                self._record_failure(tier, request.request_id, failed.instance_id, error, new_tokens, history)

        span = telemetry.child_span(
            self._tracer,
            "penstock.worker.v1.WorkerService/Generate",
            {
                "rpc.system": "grpc",
                "rpc.method": "penstock.worker.v1.WorkerService/Generate",
                "server.address": record.address,
                "penstock.instance_id": record.instance_id,
                "penstock.offset": len(assembler.token_ids),
            },
            parent=parent,
            kind=SpanKind.CLIENT,
        )
        context = telemetry.context_of(span, parent)
        moving: asyncio.Task[Moved | NotMoved] | None = None
        reply = MovableReply(
            self._workers,
            record,
            asked,
            deadline_s,
            telemetry.inject(context),
            on_failure=failed_meanwhile,
            may_move=lambda: not history.is_poisonous(self._policy.max_deaths),
        )
        self._replies[request.request_id] = reply
        try:
            with ExitStack() as sent:
                sent.enter_context(self._pool.sending(record.instance_id))
                async with aclosing(reply.events(assembler.take)) as events:
                    async for event in events:
                        match event:
                            case WorkerAdmitted():
                                yield TierAdmitted(
                                    tier,
                                    reply.record.instance_id,
                                    event.slo_kept,
                                    event.prompt_tokens,
                                    event.max_output_tokens,
                                )
                            case WorkerDeclined():
                                yield TierDeclined(tier, reply.record.instance_id, event.reason)
                            case MoveAdvice() if moving is None or moving.done():
                                moving = asyncio.create_task(
                                    self._agent.follow(tier, reply, name, event, context), name="move"
                                )
                            case WorkerChanged():
                                before, now, offset = (
                                    record.instance_id,
                                    event.record.instance_id,
                                    len(assembler.token_ids),
                                )
                                record, begun_at = event.record, offset
                                sent.close()
                                sent.enter_context(self._pool.sending(now))
                                span.add_event("moved", {"penstock.to": now, "penstock.offset": offset})
                                yield InstanceChanged(tier, before, now, offset, event.why, moved=True)
                            case WorkerFinished():
                                yield TierDone(event.reason, event.usage, event.stop)
                                return
        except PenstockError as error:
            span.set_status(StatusCode.ERROR, str(error))
            raise
        finally:
            if moving is not None:
                await end(moving)
            if self._replies.get(request.request_id) is reply:
                del self._replies[request.request_id]
            span.end()


def attempt_id(reply_id: str) -> str:
    """The name of one attempt at a reply, at its worker and at whichever the attempt moves to.

    No other attempt has it, of this router or another: an attempt whose end has not yet reached its worker does not stand in
    the way of the next one. The beginning is the reply's own, as far as it fits.
    """
    suffix = f":{secrets.token_hex(6)}"
    return f"{reply_id[: MAX_REQUEST_ID_CHARS - len(suffix)]}{suffix}"
