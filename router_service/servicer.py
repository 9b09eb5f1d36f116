"""RouterService and MeshService."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from google.protobuf.message import Message
from opentelemetry import trace

from penstock.mapper import to_message
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.router_service import proto_codec as codec
from penstock.router_service.generation.cascade_generation import worker_request_id
from penstock.router_service.generation.in_flight_requests import new_request_id
from penstock.router_service.generation.tier_generation import TierGeneration
from penstock.router_service.heartbeats import with_heartbeats
from penstock.router_service.request_intake import RequestIntake
from penstock.router_service.siblings.client import Siblings
from penstock.router_service.siblings.servicer import Move
from penstock.router_service.status import StatusReader
from penstock.services import proto_codec as common
from penstock.services.domain.errors import DeadlineExceeded, InvalidRequest, NotFound, NotServed, invalid
from penstock.services.domain.instances import Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.grpc_types import Context
from penstock.services.state.prompt_samples import PromptSampleStore
from penstock.services.state.served_requests import ServedRequestStore
from penstock.services.state.traces import TraceStore
from penstock.services.state.usage import KEPT_DAYS, UsageStore
from penstock.services.write_timeouts import write_deadline_s
from penstock.types.events import Finished
from penstock.types.mesh_status import ReplyMoved
from penstock.types.workers import NotMoved

ROUTER_SERVICE = pb.DESCRIPTOR.services_by_name["RouterService"].full_name
MESH_SERVICE = pb.DESCRIPTOR.services_by_name["MeshService"].full_name

MIN_INTERVAL_S = 0.1
MAX_TRACES, USUAL_TRACES = 100, 10
MAX_SERVED_PAGE = 10_000  # about 0.4 MB
MAX_PROMPT_PAGE = 100  # under 1.7 MB


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, intake: RequestIntake) -> None:
        self._intake, self._heartbeat_s = intake, intake.limits.heartbeat_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        loop, intake, left_s = asyncio.get_running_loop(), self._intake, context.time_remaining()
        deadline_s = loop.time() + (left_s if left_s is not None else intake.limits.default_deadline_s)
        write_deadline_s.set(deadline_s)
        routed = codec.request_from_proto(request, new_request_id(), deadline_s, intake.promise)
        attributes = {"gen_ai.request.model": routed.model, "penstock.request_id": routed.request_id}
        trace.get_current_span().set_attributes(attributes)
        with intake.in_flight:
            async with intake.tenancy.admitted((routed,)) as admission:
                drive = partial(intake.driver.drive, admission.requests[0])
                async with aclosing(with_heartbeats(drive, self._heartbeat_s, intake.batching)) as events:
                    try:
                        async for event in events:
                            if isinstance(event, Finished):
                                admission.finished(event)
                            elif loop.time() >= deadline_s:
                                raise DeadlineExceeded("the deadline passed while the client was reading")
                            yield codec.event_to_proto(event, self._heartbeat_s)
                    except InvalidRequest as error:
                        raise codec.in_client_fields(error) from error

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[to_message(model, pb.ServedModel) for model in self._intake.models()])


@dataclass(frozen=True, slots=True)
class MeshServicer(router_pb2_grpc.MeshServiceServicer):
    """served, prompts: None if the mesh keeps no requests, or no prompts."""

    status: StatusReader
    traces: TraceStore
    usage: UsageStore
    move: Move
    siblings: Siblings | None
    served: ServedRequestStore | None
    prompts: PromptSampleStore | None

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(status=to_message(await self.status.read(), pb.MeshStatus))

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        interval_s = common.seconds(request.interval) if request.HasField("interval") else 1.0
        if interval_s < MIN_INTERVAL_S:
            raise invalid("interval", f"must be at least {MIN_INTERVAL_S:g} s")
        while True:
            yield pb.WatchStatusResponse(status=to_message(await self.status.read(), pb.MeshStatus))
            await asyncio.sleep(interval_s)

    async def ListTraces(self, request: pb.ListTracesRequest, context: Context) -> pb.ListTracesResponse:
        if request.HasField("trace_id"):
            return pb.ListTracesResponse(traces=[codec.trace_to_proto(await self.traces.get(request.trace_id))])
        limit = _within(request, "limit_count", MAX_TRACES, USUAL_TRACES)
        traces = await self.traces.last(limit)
        return pb.ListTracesResponse(traces=[codec.trace_to_proto(spans) for spans in traces])

    async def GetUsage(self, request: pb.GetUsageRequest, context: Context) -> pb.GetUsageResponse:
        days = _within(request, "day_count", KEPT_DAYS, 1)
        usage = await self.usage.read(days, time.time())
        return pb.GetUsageResponse(entries=[codec.usage_to_proto(of, usage[of]) for of in usage])

    async def ListServedRequests(
        self, request: pb.ListServedRequestsRequest, context: Context
    ) -> pb.ListServedRequestsResponse:
        if self.served is None:
            raise NotServed("no requests are kept: router.kept_requests of the mesh file is 0")
        size = _within(request, "page_size", MAX_SERVED_PAGE)
        requests, next_token = await self.served.page(request.page_token, size)
        return pb.ListServedRequestsResponse(
            requests=[to_message(each, pb.ServedRequest) for each in requests], next_page_token=next_token
        )

    async def ListSampledPrompts(
        self, request: pb.ListSampledPromptsRequest, context: Context
    ) -> pb.ListSampledPromptsResponse:
        if self.prompts is None:
            raise NotServed("no prompts are sampled: router.sample_prompts.share of the mesh file is 0")
        size = _within(request, "page_size", MAX_PROMPT_PAGE)
        samples, next_token = await self.prompts.page(request.page_token, size)
        return pb.ListSampledPromptsResponse(
            prompts=map(codec.prompt_sample_to_proto, samples), next_page_token=next_token
        )

    async def MoveReply(self, request: pb.MoveReplyRequest, context: Context) -> pb.MoveReplyResponse:
        try:
            outcome = await self.move(request.request_id, request.instance_id)
        except NotFound:
            siblings, ids = self.siblings, (request.request_id, request.instance_id)
            elsewhere = await siblings.move(*ids) if siblings is not None else None
            if elsewhere is None:
                raise
            outcome = elsewhere
        if isinstance(outcome, NotMoved):
            return pb.MoveReplyResponse(refusal=outcome.reason)
        return pb.MoveReplyResponse(moved=to_message(outcome, pb.ReplyMoved))


def _within(request: Message, field: str, most: int, usual: int | None = None) -> int:
    """A number of a request, from 1 to `most`; `usual`, or the most, if it is not set."""
    value: int = getattr(request, field) if request.HasField(field) else usual or most
    if not 1 <= value <= most:
        raise invalid(field, f"must be from 1 to {most}, not {value}")
    return value


async def move_reply(tiers: TierGeneration, view: MeshView, request_id: str, instance_id: str) -> ReplyMoved | NotMoved:
    """Have a reply that this process streams continue on an instance of its tier.

    Raises:
        NotFound: no such worker, or no such reply in this process.
    """
    target = next((r for r in view.instances(Role.WORKER) if r.instance_id == instance_id), None)
    if target is None or target.model is None:
        raise NotFound("worker", instance_id)
    return await tiers.move(worker_request_id(request_id, target.model.tier), target, "asked for")
