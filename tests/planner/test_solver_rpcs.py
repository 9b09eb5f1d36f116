"""PlanCascade and SimulateDeployment over gRPC: a real planner, real solver processes."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from penstock import AsyncPlannerClient, CascadePlan, DeployedTier, Deployment, PlanProgress, Unreachable
from penstock.client import errors
from penstock.mapper import to_message
from penstock.planner_service.api import plans
from penstock.planner_service.api.simulations import deployment_of
from penstock.planner_service.live.solver import METHODS
from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.proto.planner.v1 import planner_pb2_grpc
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.instances import Role
from penstock.types.deployments import ReplicaGroup
from penstock.types.planning import Objective, PlanningQuestion, Trace
from penstock.types.rules import RuleOptions
from tests.support.mesh import COMPOSE
from tests.support.questions import TIERS, predicted, question
from tests.support.services import RedisProcess, serving


@pytest.fixture
async def planner(redis: RedisProcess, mesh_file: Any) -> AsyncIterator[AsyncPlannerClient]:
    file: Path = mesh_file()
    async with (
        serving(Role.PLANNER, COMPOSE[Role.PLANNER], file, redis.url) as chassis,
        AsyncPlannerClient(chassis.admin_address) as client,
    ):
        yield client


async def planned(planner: AsyncPlannerClient, asked: PlanningQuestion) -> CascadePlan:
    *progress, plan = [event async for event in planner.plan_cascade(asked)]
    assert progress
    assert all(isinstance(event, PlanProgress) for event in progress)
    assert isinstance(plan, CascadePlan)
    return plan


def but_for_time(plan: CascadePlan) -> CascadePlan:
    return dataclasses.replace(plan, seconds=0.0)


def children() -> set[int]:
    """Solver processes of this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except FileNotFoundError:  # the thread has ended since
            continue
        for pid in pids:
            with suppress(OSError):  # it has ended since
                if b"penstock.planner_service.live.solver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(int(pid))
    return found


async def one_child() -> int:
    async with asyncio.timeout(60):
        while not children():
            await asyncio.sleep(0.01)
    return children().pop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        question(min_quality=80),
        question(min_quality=80, objective=Objective.FIRST_TOKEN, percentile=90.0),
        question(min_quality=75, max_tiers=2),
        predicted(question(min_quality=80, rules=RuleOptions(skip=True))),
    ],
    ids=["slowest tier", "first token", "candidates", "skip"],
)
async def test_the_service_plans_what_the_library_plans_and_the_simulation_agrees(
    asked: PlanningQuestion, planner: AsyncPlannerClient
) -> None:
    """Every figure of the plan is the same; its deployment has the plan's latency when it is simulated."""
    plan = await planned(planner, asked)
    library = plans.plan(asked)
    sent = to_message(but_for_time(library.report()), pb.CascadePlan)
    assert to_message(but_for_time(plan), pb.CascadePlan) == sent
    if plan.candidates is not None:
        assert (plan.candidates.tiers, plan.candidates.cascades) == (TIERS, 6)
        return
    deployment = deployment_of(plan)
    replayed = await planner.simulate_deployment(asked, deployment)
    assert replayed.end_to_end_s.p95 == plan.end_to_end_p95_s
    assert replayed.user_latency_s == plan.user_latency_s
    assert [tier.requests for tier in replayed.tiers] == [tier.requests for tier in plan.tiers]
    if asked.rules == RuleOptions():
        return
    without = await planned(planner, dataclasses.replace(asked, rules=RuleOptions()))
    assert plan.latency_p95_s < without.latency_p95_s, "the case is one in which the rule helps"
    bare = [dataclasses.replace(tier, skip_below=None) for tier in deployment.tiers]
    assert await planner.simulate_deployment(asked, dataclasses.replace(deployment, tiers=tuple(bare))) != replayed


@pytest.mark.slow
async def test_what_cannot_be_had_is_told(planner: AsyncPlannerClient) -> None:
    beyond = [event async for event in planner.plan_cascade(question(min_quality=100))][-1]
    assert isinstance(beyond, Unreachable)
    assert beyond.best < 100
    assert beyond.binds == "min_quality"
    with pytest.raises(errors.InvalidRequestError) as caught:
        await planned(planner, question())
    assert list(caught.value.fields) == ["target"]
    with pytest.raises(errors.InvalidRequestError) as caught:
        await planner.simulate_deployment(question(), Deployment(()))
    assert list(caught.value.fields) == ["deployment.tiers"]
    assert not children()


async def test_who_leaves_ends_the_solver_and_a_dead_solver_is_told(redis: RedisProcess, mesh_file: Any) -> None:
    """A cancelled call's process is gone at once; one killed from outside gives INTERNAL with its reason."""
    trace = Trace(tuple((np.arange(20_000) / 50).tolist()), (9,) * 20_000, (9,) * 20_000)
    slow = dataclasses.replace(question(min_quality=80, requests=20_000), trace=trace)
    request = pb.PlanCascadeRequest(question=to_message(slow, pb.PlanningQuestion))
    async with (
        serving(Role.PLANNER, COMPOSE[Role.PLANNER], mesh_file(), redis.url) as chassis,
        aio.insecure_channel(chassis.admin_address) as channel,
    ):
        planner: Any = planner_pb2_grpc.PlannerServiceStub(channel)
        call = planner.PlanCascade(request)
        reading = asyncio.create_task(call.read())
        pid = await one_child()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        async with asyncio.timeout(60):
            while pid in children():
                await asyncio.sleep(0.01)
        call = planner.PlanCascade(request)
        reading = asyncio.create_task(call.read())
        os.kill(await one_child(), signal.SIGKILL)

        async def read_on() -> None:
            await reading
            await call.read()

        with pytest.raises(aio.AioRpcError) as caught:
            await read_on()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "killed by SIGKILL" in str(caught.value.details())
    assert errors.from_rpc(caught.value).reason == "SOLVER_FAILED"


def refused(asked: PlanningQuestion, deployment: Deployment | None = None) -> list[str]:
    """The fields that a job names in the request. It runs in this process: how they reach the caller is tested above."""
    message = to_message(asked, pb.PlanningQuestion)
    request: Any = pb.PlanCascadeRequest(question=message)
    if deployment is not None:
        request = pb.SimulateDeploymentRequest(question=message, deployment=to_message(deployment, pb.Deployment))
    with pytest.raises(InvalidRequest) as caught:
        METHODS["PlanCascade" if deployment is None else "SimulateDeployment"](request.SerializeToString(), print)
    return [problem.field for problem in caught.value.problems]


def deployed(tier: int, **rule: Any) -> Deployment:
    """A replica of each of three tiers, and a rule of one."""
    group = (ReplicaGroup(8, 1, 1),)
    tiers = [DeployedTier(group, 50.0), DeployedTier(group, 50.0), DeployedTier(group)]
    tiers[tier] = dataclasses.replace(tiers[tier], **rule)
    return Deployment(tuple(tiers))


def test_what_a_skip_rule_lacks_is_named() -> None:
    bare, asked = question(min_quality=80), predicted(question(min_quality=80))
    assert refused(dataclasses.replace(bare, rules=RuleOptions(skip=True))) == ["rules.skip"]
    for tier, limit, of, field in (
        (0, 101.0, asked, "deployment.tiers[0].skip_below"),
        (1, float("nan"), asked, "deployment.tiers[1].skip_below"),
        (2, 10.0, asked, "deployment.tiers[2].skip_below"),
        (0, 10.0, bare, "quality.prompts"),
    ):
        assert refused(of, deployed(tier, skip_below=limit)) == [field]
