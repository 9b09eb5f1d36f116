"""RouterProcessService: serves the other processes of this router."""

from collections.abc import Awaitable, Callable

from grpc import aio

from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from router_service.domain.burst_counts import BurstCounts
from router_service.domain.slo_counts import SloCounts
from router_service.migration.movable_reply import Moved, NotMoved
from router_service.siblings.counters import ProcessCounters
from services import grpc_server
from services import proto_codec as common
from services.channels import server_options
from services.domain.errors import NotFound, PenstockError
from services.domain.instances import Role
from services.field_problems import SettingsError
from services.grpc_types import Context
from services.process_slot import ProcessSlot

Move = Callable[[str, str], Awaitable[Moved | NotMoved]]
"""Moves a reply, given by its request id, to an instance, given by its id; NotFound if it is not streamed here."""


class RouterProcessServicer(router_pb2_grpc.RouterProcessServiceServicer):
    def __init__(self, counters: Callable[[], ProcessCounters], move: Move) -> None:
        self._counters, self._move = counters, move

    async def GetCounters(self, request: pb.GetCountersRequest, context: Context) -> pb.GetCountersResponse:
        return counters_to_proto(self._counters())

    async def MoveOwnReply(self, request: pb.MoveOwnReplyRequest, context: Context) -> pb.MoveOwnReplyResponse:
        try:
            outcome = await self._move(request.request_id, request.instance_id)
        except NotFound:
            return pb.MoveOwnReplyResponse(not_here=True)
        except PenstockError as error:
            return pb.MoveOwnReplyResponse(refusal=str(error))
        if isinstance(outcome, NotMoved):
            return pb.MoveOwnReplyResponse(refusal=outcome.reason)
        return pb.MoveOwnReplyResponse(moved=moved_to_proto(outcome))


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


def moved_to_proto(moved: Moved) -> pb.ReplyMoved:
    return pb.ReplyMoved(offset=moved.offset, stall=common.duration(moved.stall_s), sent_bytes=moved.sent_bytes)


def slo_counters_to_proto(counts: SloCounts) -> pb.SloCounters:
    return pb.SloCounters(
        attained_count=counts.attained,
        broken_count=counts.broken,
        best_effort_count=counts.best_effort,
        declined_count=counts.declined,
    )


def burst_counters_to_proto(counts: BurstCounts) -> pb.BurstCounters:
    return pb.BurstCounters(
        step=counts.step,
        budget_left_share=counts.budget_left,
        out_of_budget=counts.out_of_budget,
        change_count=counts.changes,
        window_count=counts.window_requests,
        window_quality_sum=counts.window_quality_sum,
    )


def counters_to_proto(counters: ProcessCounters) -> pb.GetCountersResponse:
    tiers = sorted(
        {
            *counters.answered,
            *counters.escalated,
            *counters.accepted_draft_tokens,
            *counters.rejected_draft_tokens,
        }
    )
    return pb.GetCountersResponse(
        active_count=counters.active,
        waiting_count=counters.waiting,
        finished_count=counters.finished,
        failed_count=counters.failed,
        rejected_count=counters.rejected,
        failover_count=counters.failovers,
        migration_count=counters.migrations,
        advice_unmet_count=counters.advice_unmet,
        requests_per_second=counters.requests_per_s,
        recent_time_to_first_token_seconds=counters.ttft_s,
        listening=counters.listening,
        slo=slo_counters_to_proto(counters.slo),
        burst=None if counters.burst is None else burst_counters_to_proto(counters.burst),
        tiers=[
            pb.TierCounters(
                tier=tier,
                answered_count=counters.answered.get(tier, 0),
                escalated_count=counters.escalated.get(tier, 0),
                accepted_draft_token_count=counters.accepted_draft_tokens.get(tier, 0),
                rejected_draft_token_count=counters.rejected_draft_tokens.get(tier, 0),
            )
            for tier in tiers
        ],
    )
