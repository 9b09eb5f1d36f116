"""PlannerService over the plan publisher."""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing

from penstock.mapper import to_message, write
from penstock.planner_service.codecs import proto_codec as codec
from penstock.planner_service.live.plan_publisher import PlanPublisher
from penstock.planner_service.live.solver_pool import STAGES_LIMIT_S, SolverPool, SolverTimedOut
from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.proto.planner.v1 import planner_pb2_grpc
from penstock.services.domain.errors import NotFound, invalid
from penstock.services.grpc_types import Context
from penstock.services.state.plans import KEPT_REVISIONS, PlanStore
from penstock.types.plans import Plan

LISTED = 20
SERVICE = pb.DESCRIPTOR.services_by_name["PlannerService"].full_name


class PlannerServicer(planner_pb2_grpc.PlannerServiceServicer):
    def __init__(self, publisher: PlanPublisher, store: PlanStore, solvers: SolverPool) -> None:
        self._publisher, self._store, self._solvers = publisher, store, solvers

    async def GetPlan(self, request: pb.GetPlanRequest, context: Context) -> pb.GetPlanResponse:
        if request.HasField("revision"):
            return pb.GetPlanResponse(plan=to_message(await self._store.get(request.revision), pb.Plan))
        return pb.GetPlanResponse(plan=to_message(await self._current(), pb.Plan))

    async def SetPlan(self, request: pb.SetPlanRequest, context: Context) -> pb.SetPlanResponse:
        plan = codec.plan_from_proto(request.plan)
        expected = request.expected_revision if request.HasField("expected_revision") else None
        return pb.SetPlanResponse(plan=to_message(await self._publisher.publish(plan, expected), pb.Plan))

    async def WatchPlan(self, request: pb.WatchPlanRequest, context: Context) -> AsyncIterator[pb.WatchPlanResponse]:
        seen = request.after_revision if request.HasField("after_revision") else 0
        while True:
            plan = await self._publisher.newer_than(seen)
            seen = plan.revision
            yield pb.WatchPlanResponse(plan=to_message(plan, pb.Plan))

    async def ListPlans(self, request: pb.ListPlansRequest, context: Context) -> pb.ListPlansResponse:
        limit = request.limit_count if request.HasField("limit_count") else LISTED
        if not 1 <= limit <= KEPT_REVISIONS:
            raise invalid("limit_count", f"must be from 1 to {KEPT_REVISIONS}, not {limit}")
        return pb.ListPlansResponse(plans=[to_message(plan, pb.Plan) for plan in await self._store.last(limit)])

    async def PlanCascade(
        self, request: pb.PlanCascadeRequest, context: Context
    ) -> AsyncIterator[pb.PlanCascadeResponse]:
        async with aclosing(self._solvers.run("PlanCascade", request.SerializeToString())) as events:
            async for event in events:
                yield pb.PlanCascadeResponse.FromString(event)

    async def SimulateDeployment(
        self, request: pb.SimulateDeploymentRequest, context: Context
    ) -> pb.SimulateDeploymentResponse:
        answer = await self._solvers.once("SimulateDeployment", request.SerializeToString())
        return pb.SimulateDeploymentResponse.FromString(answer)

    async def PlanStages(self, request: pb.PlanStagesRequest, context: Context) -> pb.PlanStagesResponse:
        plan = await self._current()
        tier = plan.tier(request.tier)
        if tier is None:
            raise invalid("tier", f"must be {' or '.join(t.name for t in plan.tiers)}, not '{request.tier}'")
        completed = codec.completed(request, tier, self._publisher.workers(tier.name))
        try:
            payload = await self._solvers.once("PlanStages", completed.SerializeToString(), STAGES_LIMIT_S)
        except SolverTimedOut as error:
            raise invalid("trace" if request.HasField("trace") else "sequences", f"{error}: send fewer") from None
        answer = pb.PlanStagesResponse.FromString(payload)
        if request.publish and answer.verdict.favoured:
            tiers = tuple(codec.with_stages(tier, answer) if t is tier else t for t in plan.tiers)
            changed = dataclasses.replace(
                plan,
                tiers=tiers,
                source="stages",
                note=f"tier {tier.name}: {answer.verdict.sentence}",
                input_digest="",
                prediction=None,
            )
            revision = await self._publisher.publish(changed, plan.revision)
            write(revision, answer.plan)
        return answer

    async def _current(self) -> Plan:
        plan = await self._store.current()
        if plan is None:
            raise NotFound("plan", "current")
        return plan
