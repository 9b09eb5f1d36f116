"""A client for MigrateIn of another worker."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from penstock.mapper import to_message
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services import errors, telemetry
from penstock.services.channels import ChannelPool
from penstock.services.domain.errors import Unavailable
from penstock.services.proto_codec import received
from penstock.types.workers import ToSource, ToTarget
from penstock.worker_service.migration.sender import MAX_TRANSFER_S


class PeerStream:
    """One MigrateIn call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, message: ToTarget) -> None:
        try:
            with errors.of_calls():
                await self._call.write(to_message(message, pb.MigrateInRequest))
        except asyncio.InvalidStateError:
            raise Unavailable("the target has ended the stream") from None

    async def answers(self) -> AsyncIterator[ToSource]:
        with errors.of_calls():
            while isinstance(answer := await self._call.read(), pb.MigrateInResponse):
                yield received(answer, ToSource)


@asynccontextmanager
async def dial(channels: ChannelPool, address: str) -> AsyncGenerator[PeerStream, None]:
    """Open a stream to the worker at `address`. Leaving the context cancels it."""
    stub = worker_pb2_grpc.WorkerServiceStub(channels.get(address))
    call = stub.MigrateIn(timeout=MAX_TRANSFER_S, metadata=telemetry.inject())
    try:
        yield PeerStream(call)
    finally:
        call.cancel()
