"""Calls the other processes of this router."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from grpc import aio

from penstock.mapper import from_message
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.router_service.migration.movable_reply import MAX_MOVE_S
from penstock.services.background import end
from penstock.services.channels import ChannelPool
from penstock.services.process_slot import ProcessSlot
from penstock.types.mesh_status import ProcessCounters, ReplyMoved
from penstock.types.workers import NotMoved

_log = logging.getLogger(__name__)

COUNTERS_TIMEOUT_S = 2.0  # a process needs about a millisecond, and much longer on a machine whose cores are all busy
COUNTERS_AGE_S = 0.1  # at most ten calls per second, however many clients watch the status of one process


class Siblings(AbstractAsyncContextManager["Siblings"]):
    """The other processes of the router in which this process has the slot `slot`; connected as long as the context lasts."""

    def __init__(self, slot: ProcessSlot) -> None:
        self.slot, self._channels = slot, ChannelPool()
        self.listening = False
        """Whether this process accepts new connections; reported to the others."""
        self._reading: asyncio.Task[dict[int, ProcessCounters | None]] | None = None
        self._read_at_s = float("-inf")

    async def __aexit__(self, *_: object) -> None:
        if self._reading is not None:
            await end(self._reading)
        await self._channels.keep(set())

    async def counters(self) -> Mapping[int, ProcessCounters | None]:
        """The counters of each by index, at most COUNTERS_AGE_S old; None for a process that does not respond in time."""
        now = asyncio.get_running_loop().time()
        if self._reading is None or now - self._read_at_s >= COUNTERS_AGE_S:
            self._reading, self._read_at_s = asyncio.create_task(self._read_counters()), now
        return await asyncio.shield(self._reading)

    async def any_listens(self) -> bool:
        """Whether any of them accepts new connections."""
        return any(part is not None and part.listening for part in (await self.counters()).values())

    async def move(self, request_id: str, instance_id: str) -> ReplyMoved | NotMoved | None:
        """Move a reply that one of them streams to an instance; None if none of them streams it."""
        moves = [asyncio.create_task(self._move(index, request_id, instance_id)) for index in self.slot.others()]
        try:
            for move in asyncio.as_completed(moves):
                if (outcome := await move) is not None:
                    return outcome
            return None
        finally:
            for task in moves:
                task.cancel()

    async def _read_counters(self) -> dict[int, ProcessCounters | None]:
        others = self.slot.others()
        return dict(zip(others, await asyncio.gather(*map(self._counters, others)), strict=True))

    async def _counters(self, index: int) -> ProcessCounters | None:
        try:
            response = await self._stub(index).GetCounters(pb.GetCountersRequest(), timeout=COUNTERS_TIMEOUT_S)
        except aio.AioRpcError as error:
            _log.debug("process %d does not respond: %s", index, error.details())
            return None
        return from_message(response.counters, ProcessCounters)

    async def _move(self, index: int, request_id: str, instance_id: str) -> ReplyMoved | NotMoved | None:
        request = pb.MoveOwnReplyRequest(request_id=request_id, instance_id=instance_id)
        try:
            response = await self._stub(index).MoveOwnReply(request, timeout=MAX_MOVE_S)
        except aio.AioRpcError as error:
            _log.info("process %d does not respond: %s", index, error.details())
            return None
        match response.WhichOneof("outcome"):
            case "moved":
                return from_message(response.moved, ReplyMoved)
            case "refusal":
                return NotMoved(response.refusal)
            case _:
                return None

    def _stub(self, index: int) -> "router_pb2_grpc.RouterProcessServiceAsyncStub":
        return router_pb2_grpc.RouterProcessServiceStub(self._channels.get(self.slot.socket(index)))
