"""WorkerService over one engine."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager

from opentelemetry import trace
from opentelemetry.metrics import Observation

from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from services import proto_codec as common
from services.domain.errors import InstanceDraining, NotServed, RequestFailed, invalid
from services.domain.requests import FinishReason, TokenFrame
from services.domain.stages.bidding import RefusalReason
from services.grpc_types import Context
from services.interceptors import CallRecorder
from services.telemetry import Telemetry
from worker_service import proto_codec as codec
from worker_service.engine.interface import Admitted, Engine, Finished, Verifying
from worker_service.load_tracker import LoadTracker
from worker_service.migration.messages import NotMoved
from worker_service.migration.receiver import Receiver
from worker_service.migration.sender import Sender
from worker_service.output_coalescing import CoalescingLimits, coalesced
from worker_service.reply_demultiplexer import ReplyDemultiplexer
from worker_service.stage_tracker import StageTracker
from worker_service.transfer_queue import TransferQueue

SERVICE = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
CUT_OFF_MARGIN_S = 1.0  # of a Drain's deadline, left for cutting off and answering


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one engine; counts what is running, so that draining knows when it is done."""

    def __init__(
        self,
        engine: Engine,
        tracker: LoadTracker,
        stages: StageTracker,
        transfers: TransferQueue,
        frames: CoalescingLimits,
        measured: Telemetry,
        *,
        instance_id: str,
        tier: str,
        sender: Sender | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        """sender, receiver: of an engine whose KV can move."""
        self._sender, self._receiver = sender, receiver
        self._engine, self._tracker, self._frames = engine, tracker, frames
        self._stages, self._transfers = stages, transfers
        self._instance_id, self._tier = instance_id, tier
        self._labels = {"gen_ai.request.model": engine.info.model, "penstock.tier": tier}
        self._calls = CallRecorder(measured)
        meter = measured.meter
        self._ttft = meter.create_histogram("gen_ai.server.time_to_first_token", unit="s")
        self._tpot = meter.create_histogram("gen_ai.server.time_per_output_token", unit="s")
        self._duration = meter.create_histogram("gen_ai.server.request.duration", unit="s")
        self._tokens = 0
        meter.create_observable_counter(  # read now and then: cheaper than told of every token
            "gen_ai.server.output_tokens",
            callbacks=[lambda _: [Observation(self._tokens, self._labels)]],
            unit="{token}",
        )
        self._advised = meter.create_counter(
            "penstock.worker.move_advice", unit="{advice}", description="Requests advised to move, by reason."
        )
        self._failures = meter.create_counter(
            "penstock.worker.failed_requests",
            unit="{request}",
            description="Requests that the engine could not compute; the others went on.",
        )
        self._running: set[str] = set()
        self._none_running = asyncio.Event()
        self._none_running.set()
        self.draining = asyncio.Event()
        """Set once no new requests are taken."""

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        async with aclosing(self._reply(request)) as events:
            async for event in events:
                yield event

    async def GenerateMany(
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: Context
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        session = ReplyDemultiplexer(self._reply, self._calls, self.draining)
        async with aclosing(session.run(request_iterator)) as messages:
            async for message in messages:
                yield message

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if not request.request_id:
            raise invalid("request_id", "must not be empty")
        return pb.AbortResponse(aborted=await self._engine.abort(request.request_id))

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        return codec.info_to_proto(self._engine.info, self._instance_id, self._tier)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        return codec.load_to_proto(
            self._tracker.load(),
            draining=self.draining.is_set(),
            preemptions=self._engine.preemptions,
            steps=self._engine.steps or 0,
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self.draining.set()
        left_s = context.time_remaining()
        try:
            async with asyncio.timeout(None if left_s is None else max(0.0, left_s - CUT_OFF_MARGIN_S)):
                await self.drained()
        except TimeoutError:
            cut_off = {key.rpartition("/")[0] for key in self._running}
            for request_id in cut_off:
                await self._engine.abort(request_id)
            return pb.DrainResponse(cut_off_count=len(cut_off))
        return pb.DrainResponse()

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyResponse:
        if not isinstance(self._engine, Verifying):
            raise NotServed("this engine cannot verify drafts")
        sampling = common.sampling_from_proto(request.sampling)
        if problems := [*sampling.problems("sampling")]:
            raise invalid(problems[0].field, problems[0].problem)
        if not request.request_id:
            raise invalid("request_id", "must not be empty")
        with self._counting_failures():
            found = await self._engine.verify(
                request.request_id,
                request.prefix_token_ids,
                request.draft_token_ids,
                sampling,
                offset=request.offset,
                distributions=codec.distributions_from_proto(request),
            )
        return pb.VerifyResponse(accepted_count=found.accepted, next_token_id=found.next_token)

    async def PlaceBid(self, request: pb.PlaceBidRequest, context: Context) -> pb.PlaceBidResponse:
        bid = self._transfers.bid(codec.ask_from_proto(request), request.model_digest, draining=self.draining.is_set())
        return codec.bid_to_proto(bid, self._tracker.load().free_kv_blocks)

    async def ConfirmBid(
        self, request_iterator: AsyncIterator[pb.ConfirmBidRequest], context: Context
    ) -> AsyncIterator[pb.ConfirmBidResponse]:
        confirmed = (await _next_step(request_iterator, "confirmed")).confirmed
        ask = codec.ask_from_proto(confirmed, "confirmed.")
        with self._transfers.won(ask, confirmed.model_digest, draining=self.draining.is_set()) as won:
            if isinstance(won, RefusalReason):
                yield pb.ConfirmBidResponse(refusal=won.value)
                return
            while True:
                starving = await won.turn()
                yield pb.ConfirmBidResponse(transfer_turn=pb.TransferTurn(starving=starving))
                step = await _next_step(request_iterator, "sender_busy", "transfer_started")
                if step.HasField("transfer_started"):
                    break
                won.sender_busy()
            won.started()
            async for _ in request_iterator:
                raise invalid("step", "nothing comes after transfer_started but the end of the call")

    async def MigrateOut(self, request: pb.MigrateOutRequest, context: Context) -> AsyncIterator[pb.MigrateOutResponse]:
        if self._sender is None:
            raise NotServed("this engine's requests cannot move")
        for name in ("request_id", "transfer_id", "target_address"):
            if not getattr(request, name):
                raise invalid(name, "must not be empty")
        async with self._transfers.sending(request.request_id, starving=request.starving) as free:
            if not free:
                yield codec.report_to_proto(NotMoved("another request is being sent", busy=True))
                return
            reports = self._sender.move(request.request_id, request.transfer_id, request.target_address)
            async with aclosing(reports):
                async for report in reports:
                    yield codec.report_to_proto(report)

    async def MigrateIn(
        self, request_iterator: AsyncIterator[pb.MigrateInRequest], context: Context
    ) -> AsyncIterator[pb.MigrateInResponse]:
        if self._receiver is None:
            raise NotServed("this engine cannot take over running requests")
        messages = (codec.to_target_from_proto(message) async for message in request_iterator)
        async with aclosing(self._receiver.receive(messages)) as answers:
            async for answer in answers:
                yield codec.to_source_to_proto(answer)

    async def drained(self) -> None:
        """Take nothing new; return once nothing runs."""
        self.draining.set()
        await self._none_running.wait()

    async def _reply(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The events of one request; the current span is its own."""
        if self.draining.is_set():
            raise InstanceDraining("this worker is draining")
        asked = codec.request_from_proto(request)
        began, first_at, last_at, prompt_tokens = time.monotonic(), None, 0.0, 0
        span = trace.get_current_span()
        key = f"{asked.request_id}/{id(asked)}"
        self._running.add(key)
        self._none_running.clear()
        try:
            async with AsyncExitStack() as stack:
                stack.enter_context(self._counting_failures())
                if request.transfer_id:
                    if self._receiver is None:
                        raise NotServed("this engine cannot take over running requests")
                    claim = await stack.enter_async_context(self._receiver.claim(request.transfer_id, asked))
                    yield codec.HEARTBEAT  # it is waited for: the source may call
                    events = coalesced(claim.events(), self._frames)
                else:
                    events = coalesced(self._engine.generate(asked), self._frames)
                stack.push_async_callback(events.aclose)
                async for event in events:
                    if event is None:
                        yield codec.HEARTBEAT
                        continue
                    if isinstance(event, Finished):
                        self._measure(event, began, first_at, last_at, len(asked.resume_token_ids))
                    elif isinstance(event, TokenFrame):
                        last_at = time.monotonic()  # the caller's own slowness is not in it
                    yield codec.event_to_proto(event)
                    if isinstance(event, TokenFrame):
                        self._tokens += len(event.token_ids)
                        if first_at is None:
                            first_at = last_at
                            span.add_event("first token")
                        self._stages.grew(asked.request_id, prompt_tokens + event.offset + len(event.token_ids))
                    elif isinstance(event, Admitted):
                        prompt_tokens = event.prompt_tokens
                    if (advice := self._stages.advice(asked.request_id, time.monotonic())) is not None:
                        reason = {"penstock.reason": advice.reason.value}
                        self._advised.add(1, {"penstock.tier": self._tier} | reason)
                        span.add_event("move advised", reason | {"penstock.sequence_tokens": advice.tokens})
                        yield codec.advice_to_proto(advice)
        finally:
            span.set_attributes(
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.request.model": self._engine.info.model,
                    "penstock.tier": self._tier,
                    "penstock.instance_id": self._instance_id,
                    "penstock.request_id": asked.request_id,
                    "penstock.resumed_tokens": len(asked.resume_token_ids),
                }
            )
            self._stages.left(asked.request_id)
            self._running.discard(key)
            if not self._running:
                self._none_running.set()

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        """Count a request that the engine cannot compute."""
        try:
            yield
        except RequestFailed:
            self._failures.add(1, self._labels)
            raise

    def _measure(self, done: Finished, began: float, first_at: float | None, last_at: float, resumed: int) -> None:
        span = trace.get_current_span()
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": done.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": done.usage.output_tokens,
                "gen_ai.response.finish_reasons": [done.reason.value],
                "penstock.cached_prompt_tokens": done.usage.cached_prompt_tokens,
                "penstock.preemptions": done.preemptions,
            }
        )
        self._duration.record(time.monotonic() - began, self._labels | {"penstock.finish_reason": done.reason.value})
        if first_at is not None and done.reason is not FinishReason.ABORTED:
            self._ttft.record(first_at - began, self._labels)
            fresh = done.usage.output_tokens - resumed
            if fresh > 1:
                self._tpot.record((last_at - first_at) / (fresh - 1), self._labels)


async def _next_step(steps: AsyncIterator[pb.ConfirmBidRequest], *expected: str) -> pb.ConfirmBidRequest:
    """The agent's next message. InvalidRequest if it is none of `expected`, or if the agent has gone."""
    step = await anext(steps, None)
    if step is None or step.WhichOneof("step") not in expected:
        raise invalid("step", f"{' or '.join(expected)} is due here")
    return step
