"""One tier's reply to one request, whatever happens to the instances that compute it.

An instance that dies, goes silent or drains is replaced: the next one gets the prompt and the tokens so far, and goes on
at the same offset. Whoever reads the events sees every token once, in order.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode, Tracer

from router_service.bidding import MoveAgent
from router_service.events import InstanceChanged, TierAdmitted, TierDeclined, TierStarted
from router_service.migration import MovableReply, Moved, NotMoved, WorkerChanged
from router_service.peers import Peers
from router_service.placement import Placed
from router_service.prompt_length import PromptLengths
from router_service.worker_client import MoveAdvice, WorkerAdmitted, WorkerClient, WorkerDeclined, WorkerFinished
from services.background import end
from services.domain.errors import AlreadyRunning, DeadlineExceeded, NotFound, Overloaded, Unavailable
from services.domain.instances import InstanceRecord
from services.domain.requests import FinishReason, GenerationRequest, TokenFrame, TokenUsage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """tier_wait_s: for an instance to come (back) when the tier has none to try. attempts: instances tried in all."""

    tier_wait_s: float
    attempts: int


@dataclass(frozen=True, slots=True)
class TierDone:
    """The reply is complete."""

    reason: FinishReason
    usage: TokenUsage
    stop: str | None


GenerationEvent = TierStarted | TierAdmitted | TierDeclined | InstanceChanged | TokenFrame | TierDone


class Splice:
    """Joins the frames of several instances into one reply; pure bookkeeping."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self.token_ids = list(token_ids)

    def take(self, frame: TokenFrame) -> TokenFrame:
        """The frame, if it is the next one. Unavailable if tokens are missing or come twice: the instance is wrong."""
        if frame.offset != len(self.token_ids):
            raise Unavailable(f"a frame at {frame.offset}, where {len(self.token_ids)} was due")
        self.token_ids += frame.token_ids
        return frame


class TierGeneration:
    """Generates at the instances of one tier."""

    def __init__(
        self, peers: Peers, workers: WorkerClient, agent: MoveAgent, tracer: Tracer, patience: Patience
    ) -> None:
        self._peers, self._workers, self._agent = peers, workers, agent
        self._tracer, self._patience = tracer, patience
        self._lengths = PromptLengths()
        self._replies: dict[str, MovableReply] = {}

    async def generate(
        self, tier: str, request: GenerationRequest, deadline_s: float, parent: Context, *, may_give_up: bool
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Events of one reply; TierDone is the last.

        may_give_up: with no instance to try at the start, Unavailable at once instead of waiting for one.
        InvalidRequest, PromptTooLong (the instance refuses), Unavailable, DeadlineExceeded.
        """
        splice = Splice(request.resume_token_ids)
        current, why, attempts, most = "", "", 0, None
        prompt_tokens = self._lengths.estimate(tier, request.prompt)
        while True:
            patient = not may_give_up or current != ""
            tokens = prompt_tokens + len(splice.token_ids)
            familiar = self._peers.familiar.where(tier, request.prompt)
            record = await self._place(tier, request.request_id, tokens, current, familiar, deadline_s, patient=patient)
            attempts += 1
            greeted = False
            try:
                async with aclosing(self._attempt(tier, record, request, splice, deadline_s, parent)) as events:
                    async for event in events:
                        if not greeted:
                            greeted = True
                            yield self._greeting(tier, current, record.instance_id, splice, why)
                            current = record.instance_id
                        if isinstance(event, InstanceChanged):
                            current = event.to_instance_id
                        if isinstance(event, TierAdmitted):
                            most, prompt_tokens = event.max_output_tokens, event.prompt_tokens
                            self._lengths.learn(tier, request.prompt, prompt_tokens)
                        if isinstance(event, TierDone):
                            self._peers.familiar.learn(tier, request.prompt, current)
                        yield event
                        if isinstance(event, TierDone):
                            return
            except Overloaded as error:
                self._peers.is_full(record.instance_id, error.retry_after_s)
                attempts -= 1  # refused at the door: nothing was tried
                why = why or "full"
            except (Unavailable, AlreadyRunning, NotFound) as error:
                failed = current if greeted else record.instance_id
                _log.info("%s at %s: %s", request.request_id, failed, error)
                self._peers.suspect(failed)
                why = str(error)
                if most is not None and len(splice.token_ids) >= most:  # it died between its last token and its goodbye
                    yield TierDone(FinishReason.LENGTH, TokenUsage(0, 0, len(splice.token_ids)), None)
                    return
                if attempts >= self._patience.attempts:
                    raise Unavailable(f"tier {tier}: {attempts} instances failed, the last one: {error}") from error

    async def move(self, request_id: str, target: InstanceRecord, why: str) -> Moved | NotMoved:
        """Have a reply under way go on at another instance of its tier; return once it does, or will not.

        request_id: the worker's, as in `generate`. why: for the client's InstanceChanged event. NotFound.
        """
        reply = self._replies.get(request_id)
        if reply is None:
            raise NotFound("reply under way", request_id)
        return await reply.move(target, why, starving=True)

    @staticmethod
    def _greeting(tier: str, before: str, now: str, splice: Splice, why: str) -> TierStarted | InstanceChanged:
        """What the client is told when an instance begins to work for it."""
        if not before:
            return TierStarted(tier, now)
        return InstanceChanged(tier, before, now, len(splice.token_ids), why)

    async def _place(
        self,
        tier: str,
        request_id: str,
        tokens: int,
        avoid: str,
        familiar: str,
        deadline_s: float,
        *,
        patient: bool,
    ) -> InstanceRecord:
        """An instance, as soon as there is one. Unavailable (none within the patience), DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + (self._patience.tier_wait_s if patient else 0.0)
        while True:
            found = self._peers.place(tier, request_id, tokens, avoid=avoid, familiar=familiar)
            if isinstance(found, Placed):
                return found.record
            now = loop.time()
            if now >= deadline_s:
                raise DeadlineExceeded(f"the deadline passed while tier {tier} had no place")
            if not found.full and now >= give_up_at:
                raise Unavailable(f"tier {tier} has no instance to try")
            await self._peers.change(min(self._peers.wait_s(), deadline_s - now))

    async def _attempt(
        self,
        tier: str,
        record: InstanceRecord,
        request: GenerationRequest,
        splice: Splice,
        deadline_s: float,
        parent: Context,
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The reply's rest at one instance."""
        if asyncio.get_running_loop().time() >= deadline_s:
            raise DeadlineExceeded("the deadline passed")
        asked = replace(request, resume_token_ids=tuple(splice.token_ids))
        span = self._tracer.start_span(
            "penstock.worker.v1.WorkerService/Generate",
            context=parent,
            kind=SpanKind.CLIENT,
            attributes={
                "rpc.system": "grpc",
                "rpc.method": "penstock.worker.v1.WorkerService/Generate",
                "server.address": record.address,
                "penstock.instance_id": record.instance_id,
                "penstock.offset": len(splice.token_ids),
            },
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span, parent))
        moving: asyncio.Task[Moved | NotMoved] | None = None
        reply = MovableReply(self._workers, record, asked, deadline_s, tuple(carrier.items()))
        self._replies[request.request_id] = reply
        try:
            with ExitStack() as sent:
                sent.enter_context(self._peers.sending(record.instance_id))
                async with aclosing(reply.events()) as events:
                    async for event in events:
                        match event:
                            case TokenFrame():
                                yield splice.take(event)
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
                                inside = trace.set_span_in_context(span, parent)
                                moving = asyncio.create_task(
                                    self._agent.follow(tier, reply, request.request_id, event, inside), name="move"
                                )
                            case WorkerChanged():
                                before, now, offset = (
                                    record.instance_id,
                                    event.record.instance_id,
                                    len(splice.token_ids),
                                )
                                record = event.record
                                sent.close()
                                sent.enter_context(self._peers.sending(now))
                                span.add_event("moved", {"penstock.to": now, "penstock.offset": offset})
                                yield InstanceChanged(tier, before, now, offset, event.why, moved=True)
                            case WorkerFinished():
                                yield TierDone(event.reason, event.usage, event.stop)
                                return
        except (Unavailable, Overloaded, DeadlineExceeded) as error:
            span.set_status(StatusCode.ERROR, str(error))
            raise
        finally:
            if moving is not None:
                await end(moving)
            if self._replies.get(request.request_id) is reply:
                del self._replies[request.request_id]
            span.end()
