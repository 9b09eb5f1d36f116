"""RouterProcessService: serves the other processes of this router."""

from collections.abc import Awaitable, Callable

from grpc import aio

from penstock.mapper import to_message
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.services import grpc_server
from penstock.services.channels import server_options
from penstock.services.domain.errors import NotFound, PenstockError
from penstock.services.domain.instances import Role
from penstock.services.field_problems import SettingsError
from penstock.services.grpc_types import Context
from penstock.services.process_slot import ProcessSlot
from penstock.types.mesh_status import ProcessCounters, ReplyMoved
from penstock.types.workers import NotMoved

Move = Callable[[str, str], Awaitable[ReplyMoved | NotMoved]]
"""Moves a reply, given by its request id, to an instance, given by its id; NotFound if it is not streamed here."""


class RouterProcessServicer(router_pb2_grpc.RouterProcessServiceServicer):
    def __init__(self, counters: Callable[[], ProcessCounters], move: Move) -> None:
        self._counters, self._move = counters, move

    async def GetCounters(self, request: pb.GetCountersRequest, context: Context) -> pb.GetCountersResponse:
        return pb.GetCountersResponse(counters=to_message(self._counters(), pb.ProcessCounters))

    async def MoveOwnReply(self, request: pb.MoveOwnReplyRequest, context: Context) -> pb.MoveOwnReplyResponse:
        try:
            outcome = await self._move(request.request_id, request.instance_id)
        except NotFound:
            return pb.MoveOwnReplyResponse(not_here=True)
        except PenstockError as error:
            return pb.MoveOwnReplyResponse(refusal=str(error))
        if isinstance(outcome, NotMoved):
            return pb.MoveOwnReplyResponse(refusal=outcome.reason)
        return pb.MoveOwnReplyResponse(moved=to_message(outcome, pb.ReplyMoved))


async def start_server(slot: ProcessSlot, servicer: RouterProcessServicer) -> aio.Server:
    """Start a server on this process's Unix socket only.

    Raises:
        SettingsError: It cannot listen on the socket.
    """
    server = grpc_server.server((), server_options(Role.ROUTER))
    router_pb2_grpc.add_RouterProcessServiceServicer_to_server(servicer, server)
    address = slot.socket(slot.index)
    try:
        server.add_insecure_port(address)
    except RuntimeError:
        raise SettingsError(f"--slot: cannot listen at {address}") from None
    await server.start()
    return server
