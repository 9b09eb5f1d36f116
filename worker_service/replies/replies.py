"""Serves the replies of an engine for all RPCs: events, metrics, draining."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Protocol

from opentelemetry import trace
from opentelemetry.metrics import Meter, Observation

from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.services.domain.errors import InstanceDraining, InternalError, NotServed, RequestFailed, Unavailable
from penstock.types.replies import FinishReason, TokenFrame, Usage
from penstock.types.requests import Draft, GenerationRequest
from penstock.types.slo import SloClass
from penstock.types.workers import Admitted, Declined, EngineFinished, HandedOver
from penstock.worker_service import proto_codec as codec
from penstock.worker_service.engine.interface import Capability, Engine, EngineEvent, Speculating
from penstock.worker_service.migration.receiver import KvReceiver
from penstock.worker_service.replies.heartbeats import Heartbeats
from penstock.worker_service.stages.stage_tracker import StageTracker

KEEPING_SLOS = frozenset({Capability.SLO, Capability.SLO_PREDICTED})
NO_SLOS = "this engine keeps no SLOs"


class ReplyWriter(Protocol):
    """The output of one reply. Its methods do not block: the sender buffers what its peer has not read."""

    def tokens(self, frame: TokenFrame) -> None: ...

    def event(self, event: pb.GenerateResponse) -> None:
        """Send any event but tokens and the terminal one."""
        ...


class Replies:
    """All replies of a worker. Counts running ones for draining."""

    def __init__(
        self,
        engine: Engine,
        stages: StageTracker,
        heartbeats: Heartbeats,
        meter: Meter,
        *,
        instance_id: str,
        tier: str,
        receiver: KvReceiver | None,
    ) -> None:
        """receiver: of an engine whose KV can move."""
        self._engine, self.stages, self._heartbeats, self._receiver = engine, stages, heartbeats, receiver
        self.instance_id, self.tier = instance_id, tier
        self._labels = {"gen_ai.request.model": engine.info.model, "penstock.tier": tier}
        self._ttft = meter.create_histogram("gen_ai.server.time_to_first_token", unit="s")
        self._tpot = meter.create_histogram("gen_ai.server.time_per_output_token", unit="s")
        self._duration = meter.create_histogram("gen_ai.server.request.duration", unit="s")
        self.tokens = 0
        read = [lambda _: [Observation(self.tokens, self._labels)]]  # which is cheaper than an addition per token
        meter.create_observable_counter("gen_ai.server.output_tokens", read, "{token}")
        self.advised = meter.create_counter(
            "penstock.worker.move_advice", unit="{advice}", description="Requests advised to move, by reason."
        )
        self._slo_decisions = meter.create_counter(
            "penstock.worker.slo_decisions",
            unit="{request}",
            description="Requests with an SLO, by the class in which they are served: standard, best_effort, or declined.",
        )
        self._failures = meter.create_counter(
            "penstock.worker.failed_requests",
            unit="{request}",
            description="Requests that the engine could not compute; others are not affected.",
        )
        self._drafts = meter.create_counter(
            "penstock.worker.drafts",
            unit="{request}",
            description="Requests with a draft, by what became of it: used, not_supported, other_tokenizer.",
        )
        self._running: set[str] = set()
        self._none_running = asyncio.Event()
        self._none_running.set()
        self.draining = asyncio.Event()
        """Set when no new requests are accepted."""

    @property
    def running(self) -> set[str]:
        """Ids of the requests that are running."""
        return {key.rpartition("/")[0] for key in self._running}

    async def drained(self) -> None:
        """Accept no new requests; wait until none is running."""
        self.draining.set()
        await self._none_running.wait()

    async def serve(self, request: pb.GenerateRequest, writer: ReplyWriter) -> pb.GenerateResponse:
        """Serve one request; return the terminal event when its resources are released. The current span belongs to the
        request.

        Raises:
            PenstockError: The error of the request, after all its events.
        """
        if self.draining.is_set():
            raise InstanceDraining("this worker is draining")
        generation = codec.request_from_proto(request).with_defaults(self._engine.info.sampling_defaults)
        reply = _Reply(self, generation, writer)
        key = f"{generation.request_id}/{id(generation)}"
        self._running.add(key)
        self._none_running.clear()
        if generation.draft is not None:
            self._drafts.add(1, self._labels | {"penstock.outcome": self._use_of(generation.draft)})
        try:
            async with AsyncExitStack() as stack:
                stack.enter_context(self._heartbeats.of(reply))
                events = await self._begun(generation, request.transfer_id, reply, stack)
                async for event in await stack.enter_async_context(aclosing(events)):
                    match event:
                        case Admitted():
                            reply.prompt_tokens = event.prompt_tokens
                            if generation.slo is not None and generation.slo.asks:
                                granted = SloClass.STANDARD if event.slo_kept else SloClass.BEST_EFFORT
                                self._count_decision(granted.value, reply)
                            writer.event(codec.event_to_proto(event))
                        case Declined():
                            self._count_decision(FinishReason.DECLINED.value, reply)
                            writer.event(codec.event_to_proto(event))
                        case EngineFinished():
                            self._measure(event, reply)
                            return codec.event_to_proto(event)
                        case HandedOver():
                            return codec.event_to_proto(event)
                        case TokenFrame():
                            raise TypeError("the engine yielded tokens that it should have passed to on_tokens")
            raise InternalError("the engine ended a reply without its last event")
        except RequestFailed:  # the engine cannot compute it
            self._failures.add(1, self._labels)
            raise
        finally:
            reply.span.set_attributes(
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.request.model": self._engine.info.model,
                    "penstock.tier": self.tier,
                    "penstock.instance_id": self.instance_id,
                    "penstock.request_id": generation.request_id,
                    "penstock.resumed_tokens": len(generation.resume_token_ids),
                }
            )
            self.stages.left(generation.request_id)
            self._running.discard(key)
            if not self._running:
                self._none_running.set()

    async def _begun(
        self, request: GenerationRequest, transfer_id: str, reply: "_Reply", stack: AsyncExitStack
    ) -> AsyncGenerator[EngineEvent, None]:
        """The events of a request that begins here or, with `transfer_id`, arrives from another worker."""
        if request.decline_unkept_slo and not KEEPING_SLOS & self._engine.info.capabilities:
            if transfer_id:
                raise Unavailable(NO_SLOS)
            return _declined(request)
        if not transfer_id:
            return self._engine.generate(request, reply.tokens)
        if self._receiver is None:
            raise NotServed("this engine cannot take over running requests")
        incoming = await stack.enter_async_context(self._receiver.expect(transfer_id, request, reply.tokens))
        reply.writer.event(codec.ALIVE)  # the request is expected now, so the source may call
        return incoming.events()

    def _use_of(self, draft: Draft) -> str:
        """What becomes of a draft here, for labels."""
        if Capability.DRAFTS not in self._engine.info.capabilities:
            return "not_supported"
        readable = not draft.token_ids or draft.tokenizer_digest == self._engine.tokenizer.digest
        return "used" if readable else "other_tokenizer"

    def _count_decision(self, slo_class: str, reply: "_Reply") -> None:
        """slo_class: as labels have it."""
        self._slo_decisions.add(1, self._labels | {"penstock.slo_class": slo_class})
        reply.span.set_attribute("penstock.slo_class", slo_class)

    def _measure(self, done: EngineFinished, reply: "_Reply") -> None:
        reply.span.set_attributes(
            {
                "gen_ai.usage.input_tokens": done.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": done.usage.output_tokens,
                "gen_ai.response.finish_reasons": [done.reason.value],
                "penstock.cached_prompt_tokens": done.usage.cached_prompt_tokens,
                "penstock.preemptions": done.preemptions,
            }
        )
        if reply.request.draft is not None:
            reply.span.set_attributes(
                {
                    "penstock.accepted_draft_tokens": done.usage.accepted_draft_tokens,
                    "penstock.rejected_draft_tokens": done.usage.rejected_draft_tokens,
                }
            )
        if isinstance(self._engine, Speculating) and (drafting := self._engine.speculation().drafting):
            reply.span.set_attributes(
                {
                    "penstock.draft.chain": list(drafting.chain),
                    "penstock.draft.window": drafting.window,
                    "penstock.draft.tokens": done.drafted_tokens,
                    "penstock.draft.accepted_tokens": done.accepted_drafted_tokens,
                }
            )
        total_s = time.monotonic() - reply.began_s
        self._duration.record(total_s, self._labels | {"penstock.finish_reason": done.reason.value})
        if reply.first_s is not None and done.reason is not FinishReason.ABORTED:
            self._ttft.record(reply.first_s - reply.began_s, self._labels)
            new_tokens = done.usage.output_tokens - len(reply.request.resume_token_ids)
            if new_tokens > 1:
                self._tpot.record((reply.last_s - reply.first_s) / (new_tokens - 1), self._labels)


async def _declined(request: GenerationRequest) -> AsyncGenerator[EngineEvent, None]:
    """A request is declined on behalf of an engine that keeps no SLOs."""
    yield Declined(NO_SLOS)
    yield EngineFinished(FinishReason.DECLINED, Usage(output_tokens=len(request.resume_token_ids)))


class _Reply:
    """The output of one reply. Times are of the monotonic clock; first_s: None before the first token."""

    def __init__(self, replies: Replies, request: GenerationRequest, writer: ReplyWriter) -> None:
        self._replies, self.request, self.writer = replies, request, writer
        self.span = trace.get_current_span()
        self.began_s = self.sent_s = time.monotonic()
        self.first_s: float | None = None
        self.last_s = 0.0
        self.prompt_tokens = 0

    def tokens(self, frame: TokenFrame) -> None:
        """Send a frame, and advice to move if there is any."""
        self.last_s = time.monotonic()
        self.writer.tokens(frame)
        if self.first_s is None:
            self.first_s = self.last_s
            self.span.add_event("first token")
        self._replies.tokens += len(frame.token_ids)
        self._replies.stages.grew(self.request.request_id, self.prompt_tokens + frame.end, self.prompt_tokens)
        self._advise(self.last_s)

    def heartbeat(self) -> None:
        self.writer.event(codec.ALIVE)
        self._advise(time.monotonic())

    def _advise(self, now: float) -> None:
        self.sent_s = now
        advice = self._replies.stages.advice(self.request.request_id, now)
        if advice is not None:
            reason = {"penstock.reason": advice.reason.value}
            self._replies.advised.add(1, {"penstock.tier": self._replies.tier} | reason)
            self.span.add_event("move advised", reason | {"penstock.sequence_tokens": advice.tokens})
            self.writer.event(codec.event_to_proto(advice))
