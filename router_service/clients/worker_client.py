"""Calls of WorkerService: replies, their moves, bids for them, and texts."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from penstock.mapper import from_message, to_message, write
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.router_service.clients.reply_multiplexer import MultiplexerPool
from penstock.services import errors
from penstock.services import proto_codec as common
from penstock.services.channels import ChannelPool
from penstock.services.domain.errors import Unavailable
from penstock.services.domain.instances import InstanceRecord
from penstock.services.domain.stages.bidding import Ask, Bid
from penstock.services.event_streams import OnTokens
from penstock.types.prompts import Prompt
from penstock.types.requests import GenerationRequest
from penstock.types.values import replaced
from penstock.types.workers import (
    Alive,
    EngineFinished,
    MoveReport,
    SenderBusy,
    TransferStarted,
    WorkerEnd,
    WorkerEvent,
)

Metadata = tuple[tuple[str, str], ...]
OnWorkerEvent = Callable[[WorkerEvent], None]


class Confirmation:
    """A request in a receiver's queue, as long as the call lasts."""

    def __init__(self, call: "aio.StreamStreamCall[Any, Any]") -> None:
        self._call = call

    async def turn(self) -> bool:
        """Wait for the turn; return whether the request is starving.

        Raises:
            Unavailable: The receiver refused, or is gone.
        """
        with errors.of_calls():
            response = await self._call.read()
        if not isinstance(response, pb.ConfirmBidResponse):  # EOF
            raise Unavailable("the receiver ended the call")
        if response.HasField("refusal"):
            raise Unavailable(f"refused: {response.refusal}")
        return response.transfer_turn.starving

    async def sender_busy(self) -> None:
        """The turn could not be used; wait for the next one."""
        await self._say(to_message(SenderBusy(), pb.ConfirmBidRequest))

    async def started(self) -> None:
        await self._say(to_message(TransferStarted(), pb.ConfirmBidRequest))

    async def _say(self, step: pb.ConfirmBidRequest) -> None:
        try:
            await self._call.write(step)
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise Unavailable("the receiver is gone") from error


class WorkerClient:
    """Generates at any worker by address; a worker that sends nothing for `silence_s` counts as gone."""

    def __init__(self, channels: ChannelPool, multiplexers: MultiplexerPool, silence_s: float) -> None:
        self._channels, self._multiplexers, self._silence_s = channels, multiplexers, silence_s

    async def generate(
        self,
        address: str,
        request: GenerationRequest,
        *,
        timeout_s: float,
        metadata: Metadata,
        on_event: OnWorkerEvent,
        on_tokens: OnTokens,
        transfer_id: str = "",
    ) -> WorkerEnd:
        """Have a worker serve a request; return its last event. Cancelling cancels the reply.

        on_event, on_tokens: called with all events before it, in order (`ReplyMultiplexer.reply`).
        transfer_id: of the move by which the request comes to this worker.

        Raises:
            PenstockError: The worker's error; Unavailable for a worker whose connection broke or that was silent; what the
                callbacks raise.
        """
        end = await self._multiplexers.get(address).reply(
            lambda message: write(replaced(request, transfer_id=transfer_id) if transfer_id else request, message),
            timeout_s,
            dict(metadata),
            self._silence_s,
            lambda event: on_event(_event(event)),
            on_tokens,
        )
        return _end(end)

    async def migrate_out(
        self,
        address: str,
        request_id: str,
        transfer_id: str,
        target_id: str,
        *,
        starving: bool,
        timeout_s: float,
        metadata: Metadata,
    ) -> AsyncGenerator[MoveReport, None]:
        """Have the worker at `address` move a request to the instance `target_id`. HandedOver or NotMoved is last.

        starving: the request is sent next. Leaving the iteration cancels the move if that is still possible.

        Raises:
            PenstockError: The worker's error.
        """
        request = pb.MigrateOutRequest(
            request_id=request_id, transfer_id=transfer_id, target_instance_id=target_id, starving=starving
        )
        call = self._stub(address).MigrateOut(request, timeout=timeout_s, metadata=metadata)
        try:
            with errors.of_calls():
                while isinstance(response := await call.read(), pb.MigrateOutResponse):
                    yield from_message(response, MoveReport)
        finally:
            call.cancel()

    async def ask(
        self, receiver: InstanceRecord, ask: Ask, digest: str, *, timeout_s: float, metadata: Metadata
    ) -> Bid | str:
        """A worker's bid, or why it refuses the request.

        Raises:
            PenstockError: The worker's error.
        """
        with errors.of_calls():
            response = await self._stub(receiver.address).PlaceBid(
                _bid_request(ask, digest), timeout=timeout_s, metadata=metadata
            )
        if not response.HasField("bid"):
            return response.refusal
        return Bid(receiver.instance_id, response.bid.load_tokens, common.seconds(response.bid.earliest_start))

    @asynccontextmanager
    async def confirmed(
        self, address: str, ask: Ask, digest: str, *, timeout_s: float, metadata: Metadata
    ) -> AsyncIterator[Confirmation]:
        """The request is in the worker's queue as long as the context lasts.

        Raises:
            Unavailable: The worker is gone.
        """
        call = self._stub(address).ConfirmBid(timeout=timeout_s, metadata=metadata)
        try:
            confirmation = Confirmation(call)
            await confirmation._say(pb.ConfirmBidRequest(confirmed=_bid_request(ask, digest)))
            yield confirmation
        finally:
            call.cancel()

    async def tokens(self, address: str, prompt: Prompt, timeout_s: float) -> tuple[Sequence[int], int]:
        """(token ids of a prompt, tokens of a prompt and its reply at most).

        Raises:
            PenstockError: The worker's error.
        """
        request = pb.TokenizeRequest()
        write(prompt, request.prompt)
        with errors.of_calls():
            response = await self._stub(address).Tokenize(request, timeout=timeout_s)
        return response.token_ids, response.max_context_tokens

    async def text(self, address: str, token_ids: Sequence[int], timeout_s: float) -> str:
        """The text of tokens.

        Raises:
            PenstockError: The worker's error.
        """
        with errors.of_calls():
            response = await self._stub(address).Detokenize(
                pb.DetokenizeRequest(token_ids=token_ids), timeout=timeout_s
            )
        return response.text

    def _stub(self, address: str) -> "worker_pb2_grpc.WorkerServiceAsyncStub":
        return worker_pb2_grpc.WorkerServiceStub(self._channels.get(address))


_WorkerEvent = WorkerEvent | None


def _event(response: pb.GenerateResponse) -> WorkerEvent:
    event: WorkerEvent | None = from_message(response, _WorkerEvent)
    return event or Alive()  # to what later versions add


def _end(response: pb.GenerateResponse) -> WorkerEnd:
    end: WorkerEnd = from_message(response, WorkerEnd)
    if isinstance(end, EngineFinished) and not 0 <= end.usage.compute_s < math.inf:  # would spoil the sums of a tenant
        return replaced(end, usage=replaced(end.usage, compute_s=0.0))
    return end


def _bid_request(ask: Ask, digest: str) -> pb.PlaceBidRequest:
    return pb.PlaceBidRequest(
        request_id=ask.request_id,
        sequence_tokens=ask.tokens,
        model_digest=digest,
        sender_buffered_tokens=ask.sender_tokens,
        sender_instance_id=ask.sender_id,
    )
