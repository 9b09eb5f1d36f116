"""WorkerService for one engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from penstock.mapper import to_message
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services import proto_codec as common
from penstock.services.domain.errors import InvalidRequest, NotServed, invalid
from penstock.services.domain.stages.bidding import RefusalReason
from penstock.services.grpc_types import Context
from penstock.services.interceptors import CallRecorder
from penstock.services.telemetry import Telemetry
from penstock.types.prompts import Prompt, TokenIds, prompt_problems
from penstock.types.workers import NotMoved, ToTarget, TransferTurn
from penstock.worker_service import proto_codec as codec
from penstock.worker_service.engine.interface import Engine
from penstock.worker_service.migration.receiver import KvReceiver
from penstock.worker_service.migration.sender import KvSender
from penstock.worker_service.replies.replies import Replies
from penstock.worker_service.replies.reply_demultiplexer import ReplyDemultiplexer, SingleReply
from penstock.worker_service.stages.transfer_queue import TransferQueue
from penstock.worker_service.telemetry.load_tracker import LoadTracker
from penstock.worker_service.text.text_work import TextWork

SERVICE = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
CUT_OFF_MARGIN_S = 1.0  # part of a Drain's deadline that is reserved for aborting requests and for the response


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """The RPCs of a worker."""

    def __init__(
        self,
        engine: Engine,
        tracker: LoadTracker,
        replies: Replies,
        transfers: TransferQueue,
        measured: Telemetry,
        *,
        address_of: Callable[[str], Awaitable[str]],
        sender: KvSender | None,
        receiver: KvReceiver | None,
    ) -> None:
        """address_of: finds another worker of the tier in the registry, by its instance id; raises NotFound.

        sender, receiver: of an engine whose KV can move.
        """
        self._engine, self._tracker, self._replies, self._transfers = engine, tracker, replies, transfers
        self._sender, self._receiver, self._address_of = sender, receiver, address_of
        self._calls = CallRecorder(measured)
        self.text_work = TextWork(engine.tokenizer)
        self.draining = replies.draining

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        reply = SingleReply(self._replies.serve, request)
        async with aclosing(reply.events()) as events:
            async for event in events:
                yield event

    async def GenerateMany(
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: Context
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        session = ReplyDemultiplexer(self._replies.serve, self._calls, self.draining)
        async with aclosing(session.run(request_iterator)) as messages:
            async for message in messages:
                yield message

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if not request.request_id:
            raise invalid("request_id", "must not be empty")
        return pb.AbortResponse(aborted=await self._engine.abort(request.request_id))

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        digest, replies = self._engine.tokenizer.digest, self._replies
        return codec.info_to_proto(self._engine.info, digest, replies.instance_id, replies.tier)

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
                await self._replies.drained()
        except TimeoutError:
            cut_off = self._replies.running
            for request_id in cut_off:
                await self._engine.abort(request_id)
            return pb.DrainResponse(cut_off_count=len(cut_off))
        return pb.DrainResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        common.check_calls(request.prompt)
        prompt: Prompt = common.received(request, Prompt)
        if problems := [*prompt_problems(prompt, "prompt")]:
            raise InvalidRequest(*problems)
        token_ids = await self.text_work.tokens(prompt)
        return pb.TokenizeResponse(token_ids=token_ids, max_context_tokens=self._engine.info.max_context_tokens)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        token_ids: tuple[int, ...] = common.received(request, TokenIds)
        vocab_size = self._engine.tokenizer.vocab_size
        if token_ids and max(token_ids) >= vocab_size:
            raise invalid("token_ids", f"this model's token ids end at {vocab_size - 1}")
        return pb.DetokenizeResponse(text=await self.text_work.text(token_ids))

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
                yield to_message(TransferTurn(await won.get()), pb.ConfirmBidResponse)
                step = await _next_step(request_iterator, "sender_busy", "transfer_started")
                if step.HasField("transfer_started"):
                    break
                self._transfers.sender_busy(ask)
            self._transfers.started(ask)
            async for _ in request_iterator:
                raise invalid("step", "transfer_started must be the last message")

    async def MigrateOut(self, request: pb.MigrateOutRequest, context: Context) -> AsyncIterator[pb.MigrateOutResponse]:
        if self._sender is None:
            raise NotServed("this engine's requests cannot move")
        for name in ("request_id", "transfer_id", "target_instance_id"):
            if not getattr(request, name):
                raise invalid(name, "must not be empty")
        address = await self._address_of(request.target_instance_id)
        async with self._transfers.sending(request.request_id, starving=request.starving) as free:
            if not free:
                yield to_message(NotMoved("another request is being sent", busy=True), pb.MigrateOutResponse)
                return
            reports = self._sender.move(request.request_id, request.transfer_id, address)
            async with aclosing(reports):
                async for report in reports:
                    yield to_message(report, pb.MigrateOutResponse)

    async def MigrateIn(
        self, request_iterator: AsyncIterator[pb.MigrateInRequest], context: Context
    ) -> AsyncIterator[pb.MigrateInResponse]:
        if self._receiver is None:
            raise NotServed("this engine cannot take over running requests")
        messages = (common.received(message, ToTarget) async for message in request_iterator)
        async with aclosing(self._receiver.receive(messages)) as answers:
            async for answer in answers:
                yield to_message(answer, pb.MigrateInResponse)


async def _next_step(steps: AsyncIterator[pb.ConfirmBidRequest], *expected: str) -> pb.ConfirmBidRequest:
    """The next message of the agent.

    Raises:
        InvalidRequest: It is not one of `expected`, or the call has ended.
    """
    step = await anext(steps, None)
    if step is None or step.WhichOneof("step") not in expected:
        raise invalid("step", f"{' or '.join(expected)} is expected here")
    return step
