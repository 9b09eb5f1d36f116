"""A client for MigrateIn of another worker."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from opentelemetry import propagate

from penstock.mapper import to_message
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services import errors
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


class PeerClient:
    """Calls other workers."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    @asynccontextmanager
    async def dial(self, address: str) -> AsyncGenerator[PeerStream, None]:
        """Open a stream to the worker at `address`. Leaving the context cancels it."""
        headers: dict[str, str] = {}
        propagate.inject(headers)
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(address))
        call = stub.MigrateIn(timeout=MAX_TRANSFER_S, metadata=tuple(headers.items()))
        try:
            yield PeerStream(call)
        finally:
            call.cancel()
