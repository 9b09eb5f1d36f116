"""A client for MigrateIn of another worker."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio
from opentelemetry import propagate

from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from services import errors
from services.channels import ChannelPool
from services.domain.errors import Unavailable
from worker_service import proto_codec as codec
from worker_service.migration.messages import ToSource, ToTarget
from worker_service.migration.sender import MAX_TRANSFER_S


class PeerStream:
    """One MigrateIn call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, message: ToTarget) -> None:
        try:
            await self._call.write(codec.to_target_to_proto(message))
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        except asyncio.InvalidStateError:
            raise Unavailable("the target has ended the stream") from None

    async def answers(self) -> AsyncIterator[ToSource]:
        try:
            while isinstance(answer := await self._call.read(), pb.MigrateInResponse):
                yield codec.to_source_from_proto(answer)
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error


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
