"""The bidding calls of WorkerService: get bids, confirm one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from penstock.mapper import to_message
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services import errors
from penstock.services import proto_codec as common
from penstock.services.channels import ChannelPool
from penstock.services.domain.errors import Unavailable
from penstock.services.domain.stages.bidding import Ask, Bid
from penstock.types.workers import SenderBusy, TransferStarted

Metadata = tuple[tuple[str, str], ...]


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


class BidClient:
    """Gets and confirms bids of any worker by address."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def ask(
        self, address: str, receiver_id: str, ask: Ask, digest: str, *, timeout_s: float, metadata: Metadata
    ) -> Bid | str:
        """A worker's bid, or why it refuses the request.

        Raises:
            PenstockError: The worker's error.
        """
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(address))
        with errors.of_calls():
            response = await stub.PlaceBid(_to_proto(ask, digest), timeout=timeout_s, metadata=metadata)
        if not response.HasField("bid"):
            return response.refusal
        return Bid(receiver_id, response.bid.load_tokens, common.seconds(response.bid.earliest_start))

    @asynccontextmanager
    async def confirmed(
        self, address: str, ask: Ask, digest: str, *, timeout_s: float, metadata: Metadata
    ) -> AsyncIterator[Confirmation]:
        """The request is in the worker's queue as long as the context lasts.

        Raises:
            Unavailable: The worker is gone.
        """
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(address))
        call = stub.ConfirmBid(timeout=timeout_s, metadata=metadata)
        try:
            confirmation = Confirmation(call)
            await confirmation._say(pb.ConfirmBidRequest(confirmed=_to_proto(ask, digest)))
            yield confirmation
        finally:
            call.cancel()


def _to_proto(ask: Ask, digest: str) -> pb.PlaceBidRequest:
    return pb.PlaceBidRequest(
        request_id=ask.request_id,
        sequence_tokens=ask.tokens,
        model_digest=digest,
        sender_buffered_tokens=ask.sender_tokens,
        sender_instance_id=ask.sender_id,
    )
