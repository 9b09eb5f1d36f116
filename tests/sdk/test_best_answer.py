"""Plans that deliver the best answer of a request, as clients send and read them; verdicts that name another tier."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from grpc import aio

from penstock import (
    AsyncPlannerClient,
    CascadePlan,
    Judged,
    Plan,
    PlannerClient,
    PlanningInputs,
    ReplicaGroup,
    TierPlan,
)
from penstock.cli.ask import _line
from penstock.client.messages import generation
from penstock.client.messages.served_plan import plan_from_proto, plan_to_proto
from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.proto.planner.v1 import planner_pb2_grpc
from penstock.proto.router.v1 import router_pb2
from services.grpc_types import Context

TIERS = (TierPlan("small", "s", 60.0, 1), TierPlan("large", "l", None, 1))
INPUTS = PlanningInputs({}, {"tiers": []}, [(0.0, 1, 1)], [])
GROUPS = [[ReplicaGroup(1, 1, 1)]] * 2


class Planner(planner_pb2_grpc.PlannerServiceServicer):
    """Computes a plan that delivers the best answer where it was asked to choose."""

    def __init__(self) -> None:
        self.simulated = list[bool]()

    async def PlanCascade(  # noqa: N802 - the contract
        self, request: pb.PlanCascadeRequest, context: Context
    ) -> AsyncIterator[pb.PlanCascadeResponse]:
        plan = pb.CascadePlan(best_answer=request.best_answer)
        yield pb.PlanCascadeResponse(finished=pb.PlanFinished(plan=plan))

    async def SimulateDeployment(  # noqa: N802
        self, request: pb.SimulateDeploymentRequest, context: Context
    ) -> pb.SimulateDeploymentResponse:
        self.simulated.append(request.best_answer)
        return pb.SimulateDeploymentResponse()


@asynccontextmanager
async def planner() -> AsyncIterator[tuple[Planner, str]]:
    server, servicer = aio.server(), Planner()  # type: ignore[abstract]  # it serves what is called here, no more
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize("best_answer", [False, True])
def test_a_plan_keeps_it(best_answer: bool) -> None:
    plan = Plan(TIERS, best_answer=best_answer)
    assert plan_from_proto(plan_to_proto(plan)) == plan
    assert not replace(plan, best_answer=False).best_answer


async def test_both_clients_ask_for_it_and_read_it() -> None:
    options: list[dict[str, Any]] = [{}, {"best_answer": True}]

    def ask_blocking(address: str) -> list[bool]:
        with PlannerClient(address) as client:
            plans = list[bool]()
            for each in options:
                (plan,) = client.plan_cascade(INPUTS, min_quality=80.0, **each)
                assert isinstance(plan, CascadePlan)
                plans.append(plan.best_answer)
                client.simulate_deployment(INPUTS, GROUPS, [60.0], **each)
            return plans

    async with planner() as (servicer, address), AsyncPlannerClient(address) as client:
        plans = list[bool]()
        for each in options:
            (plan,) = [event async for event in client.plan_cascade(INPUTS, min_quality=80.0, **each)]
            assert isinstance(plan, CascadePlan)
            plans.append(plan.best_answer)
            await client.simulate_deployment(INPUTS, GROUPS, [60.0], **each)
        assert plans == servicer.simulated == [False, True]
        assert await asyncio.to_thread(ask_blocking, address) == [False, True]
        assert servicer.simulated == [False, True, False, True]


def test_a_verdict_names_the_tier_whose_answer_is_delivered_instead() -> None:
    message = router_pb2.Judged(tier="large", score=30.0, scorer="s", better_tier="small")
    event = generation.event_from_proto(router_pb2.GenerateResponse(judged=message))
    assert event == Judged("large", 30.0, 0.0, False, "s", better_tier="small")
    assert _line(event) == "  large: scored 30 by s, threshold 0: the answer of small scored more"
