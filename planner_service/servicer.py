"""PlannerService over the plan keeper."""

from collections.abc import AsyncIterator

from penstock.planner.v1 import planner_pb2 as pb
from penstock.planner.v1 import planner_pb2_grpc
from planner_service import proto_codec as codec
from planner_service.keeper import PlanKeeper
from services.domain.errors import NotFound
from services.grpc_types import Context
from services.state import PlanStore

SERVICE = pb.DESCRIPTOR.services_by_name["PlannerService"].full_name


class PlannerServicer(planner_pb2_grpc.PlannerServiceServicer):
    def __init__(self, keeper: PlanKeeper, store: PlanStore) -> None:
        self._keeper, self._store = keeper, store

    async def GetPlan(self, request: pb.GetPlanRequest, context: Context) -> pb.GetPlanResponse:
        if request.HasField("revision"):
            return pb.GetPlanResponse(plan=codec.plan_to_proto(await self._store.get(request.revision)))
        plan = await self._store.current()
        if plan is None:
            raise NotFound("plan", "current")
        return pb.GetPlanResponse(plan=codec.plan_to_proto(plan))

    async def SetPlan(self, request: pb.SetPlanRequest, context: Context) -> pb.SetPlanResponse:
        plan = codec.plan_from_proto(request.plan)
        expected = request.expected_revision if request.HasField("expected_revision") else None
        return pb.SetPlanResponse(plan=codec.plan_to_proto(await self._keeper.publish(plan, expected)))

    async def WatchPlan(self, request: pb.WatchPlanRequest, context: Context) -> AsyncIterator[pb.WatchPlanResponse]:
        seen = request.after_revision if request.HasField("after_revision") else 0
        while True:
            plan = await self._keeper.newer_than(seen)
            seen = plan.revision
            yield pb.WatchPlanResponse(plan=codec.plan_to_proto(plan))
