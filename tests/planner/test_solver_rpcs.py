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
import yaml
from grpc import aio

from penstock import (
    AsyncPlannerClient,
    CascadePlan,
    EarlyCheck,
    JudgedPrompt,
    PlannedEarlyChecks,
    PlanningInputs,
    PlanProgress,
    ReplicaGroup,
)
from penstock.client import errors
from penstock.client.messages import planning
from penstock.client.messages.planning import plan_request
from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.proto.planner.v1 import planner_pb2_grpc
from planner_service.plan_cascade import plan_cascade
from planner_service.planning_codec import inputs_from_proto
from planner_service.simulator.felt import Objective
from planner_service.solver import METHODS
from services.domain import Role
from services.domain.errors import InvalidRequest
from services.testing import RedisProcess, serving
from tests.conftest import ROOT
from tests.support.mesh import COMPOSE

TIERS = ("small", "medium", "large")


def inputs(requests: int = 40) -> pb.PlanningInputs:
    """The DeepSeek cascade on 24 GPUs, and a workload of our own making."""
    rng = np.random.default_rng(5)
    cluster = pb.Cluster(gpu_name="h100", nodes=3, gpus_per_node=8, node_link_gb_per_s=50)
    models = ("deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b", "deepseek-r1-671b-awq")
    tiers = [pb.CascadeTier(name=n, model_name=m) for n, m in zip(TIERS, models, strict=True)]
    judged = [
        pb.JudgedPrompt(
            input_tokens=int(rng.integers(20, 900)),
            output_tokens=[int(n) for n in rng.integers(20, 300, 3)],
            judge_scores=[float(s) for s in np.clip(np.array([60, 75, 90]) - rng.normal(0, 20), 0, 100).round()],
        )
        for _ in range(100)
    ]
    trace = pb.Trace(arrival_s=np.cumsum(rng.exponential(0.2, 300)), input_tokens=[100] * 300, output_tokens=[50] * 300)
    return pb.PlanningInputs(
        cluster=cluster,
        cascade=pb.Cascade(tiers=tiers, judge_s=0.1),
        workload=pb.Workload(trace=trace, judged=judged, requests=requests, rate=10),
    )


Planner = Any  # PlannerServiceAsyncStub exists for type checkers alone


@pytest.fixture
async def planner(redis: RedisProcess, mesh_file: Any) -> AsyncIterator[Planner]:
    file: Path = mesh_file()
    async with (
        serving(Role.PLANNER, COMPOSE[Role.PLANNER], file, redis.url) as chassis,
        aio.insecure_channel(chassis.admin_address) as channel,
    ):
        yield planner_pb2_grpc.PlannerServiceStub(channel)


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
                if b"planner_service.solver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(int(pid))
    return found


async def one_child() -> int:
    async with asyncio.timeout(60):
        while not children():
            await asyncio.sleep(0.01)
    return children().pop()


@pytest.mark.slow
async def test_the_service_plans_what_the_library_plans_and_the_simulation_agrees(planner: Planner) -> None:
    asked = inputs()
    events = [e async for e in planner.PlanCascade(pb.PlanCascadeRequest(inputs=asked, min_quality=80))]
    assert [e.WhichOneof("event") for e in events[:-1]] == ["progress"] * (len(events) - 1)
    assert len(events) >= 2
    plan = events[-1].finished.plan
    site, demand = inputs_from_proto(asked)
    ours = plan_cascade(site, demand, min_quality=80, seed=1)
    assert [t.threshold for t in plan.tiers if t.HasField("threshold")] == [h for h in ours.thresholds if h <= 100]
    assert [t.gpus for t in plan.tiers] == [t.gpus for t in ours.tiers]
    assert (plan.quality, plan.latency_p95_s) == (ours.quality, ours.latency_p95_s)
    assert len(plan.workload_digest) == 16
    tiers = [
        pb.SimulatedTier(replicas=t.replicas, threshold=t.threshold if t.HasField("threshold") else None)
        for t in plan.tiers
    ]
    replayed = await planner.SimulateDeployment(pb.SimulateDeploymentRequest(inputs=asked, tiers=tiers))
    assert replayed.end_to_end.p95 == plan.end_to_end_p95_s
    assert [t.requests for t in replayed.tiers] == [t.report.requests for t in plan.tiers]
    exact = pb.PlanCascadeRequest(inputs=asked, min_quality=80, budget=pb.GPU_BUDGET_EXACT)
    whole = [e async for e in planner.PlanCascade(exact)][-1].finished.plan
    assert sum(t.gpus for t in whole.tiers) == site.cluster.gpus
    exact.objective = pb.OBJECTIVE_END_TO_END
    with pytest.raises(aio.AioRpcError, match="budget") as caught:
        _ = [e async for e in planner.PlanCascade(exact)]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    beyond = [e async for e in planner.PlanCascade(pb.PlanCascadeRequest(inputs=asked, min_quality=100))]
    assert beyond[-1].finished.unreachable.best < 100
    assert beyond[-1].finished.unreachable.binds == "min_quality"
    assert not children()


@pytest.mark.slow
async def test_the_service_plans_for_the_latency_that_is_named(planner: Planner) -> None:
    """p90 to the first visible token, as the library plans it; a target that cannot be met says which latency it is."""
    asked = inputs()
    request = pb.PlanCascadeRequest(
        inputs=asked, min_quality=80, objective=pb.OBJECTIVE_FIRST_TOKEN, percentile=90, goal=pb.GOAL_LATENCY
    )
    plan = [e async for e in planner.PlanCascade(request)][-1].finished.plan
    site, demand = inputs_from_proto(asked)
    ours = plan_cascade(site, demand, min_quality=80, seed=1, objective=Objective.FIRST_TOKEN, percentile=90.0)
    assert (plan.objective, plan.percentile, plan.latency_s) == (pb.OBJECTIVE_FIRST_TOKEN, 90, ours.felt_s)
    assert plan.user_latency.first_token.p95 == ours.felt.first_token.p95
    tiers = [
        pb.SimulatedTier(replicas=t.replicas, threshold=t.threshold if t.HasField("threshold") else None)
        for t in plan.tiers
    ]
    replayed = await planner.SimulateDeployment(pb.SimulateDeploymentRequest(inputs=asked, tiers=tiers))
    assert replayed.user_latency == plan.user_latency
    request.max_latency_s = ours.felt_s / 1000
    late = [e async for e in planner.PlanCascade(request)][-1].finished.unreachable
    assert late.binds == "max_latency_s"
    assert "p90 time to the first visible token" in late.reason


@pytest.mark.slow
async def test_the_service_chooses_the_cascade_that_the_library_chooses(planner: Planner) -> None:
    """Tiers, figures and runner-up; progress never goes back; a number that the candidates do not have is named."""
    wish = inputs()
    request = pb.PlanCascadeRequest(inputs=wish, min_quality=75, max_tiers=2)
    events = [planning.plan_event_from_proto(e) async for e in planner.PlanCascade(request)]
    *progress, plan = events
    assert isinstance(plan, CascadePlan)
    counts = [event.evaluations for event in progress if isinstance(event, PlanProgress)]
    assert counts == sorted(counts)
    site, demand = inputs_from_proto(wish)
    ours = plan_cascade(site, demand, min_quality=75, seed=1, max_tiers=2)
    assert ours.choice is not None
    assert [tier.name for tier in plan.tiers] == [tier.name for tier in ours.tiers]
    assert (plan.quality, plan.latency_p95_s, plan.gap) == (ours.quality, ours.latency_p95_s, ours.solution.gap)
    assert plan.choice is not None
    assert (plan.choice.candidates, plan.choice.considered) == (TIERS, 6)
    assert plan.choice.planned + sum(plan.choice.left_out.values()) == 6
    assert plan.choice.left_out == {why.value: count for why, count in ours.choice.left_out.items()}
    other, expected = plan.choice.runner_up, ours.choice.runner_up
    assert other is not None
    assert expected is not None
    assert (other.tiers, other.quality, other.gpus) == (expected.tiers, expected.quality, expected.gpus)
    for refused, field in (
        (pb.PlanCascadeRequest(inputs=wish, min_quality=80, max_tiers=4), "max_tiers"),
        (pb.PlanCascadeRequest(inputs=wish, min_quality=80, min_tiers=1), "min_tiers"),
    ):
        with pytest.raises(aio.AioRpcError) as caught:
            _ = [e async for e in planner.PlanCascade(refused)]
        error = errors.from_rpc(caught.value)
        assert isinstance(error, errors.InvalidRequestError)
        assert list(error.fields) == [field]


async def test_who_leaves_ends_the_solver_and_a_dead_solver_is_told(planner: Planner) -> None:
    """A cancelled call's process is gone at once; one killed from outside gives INTERNAL with its reason."""
    slow = pb.PlanCascadeRequest(inputs=inputs(20_000), min_quality=80)
    slow.inputs.workload.trace.CopyFrom(
        pb.Trace(arrival_s=np.arange(20_000) / 50, input_tokens=[9] * 20_000, output_tokens=[9] * 20_000)
    )
    call = planner.PlanCascade(slow)
    reading = asyncio.create_task(call.read())
    pid = await one_child()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    async with asyncio.timeout(60):
        while pid in children():
            await asyncio.sleep(0.01)
    call = planner.PlanCascade(slow)
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


def example_inputs() -> PlanningInputs:
    """What the shipped example files say, with a small workload of our own."""
    cluster = yaml.safe_load((ROOT / "examples" / "cluster-4x8-h100.yaml").read_text())
    cascade = yaml.safe_load((ROOT / "examples" / "deepseek-cascade.yaml").read_text())
    cascade = {**cascade, "tiers": cascade["tiers"][:2]}
    prompts = [JudgedPrompt(100, (50, 60), (60.0, 80.0)), JudgedPrompt(200, (70, 80), (90.0, 95.0))]
    return PlanningInputs(cluster, cascade, [(i / 4, 10, 10) for i in range(20)], prompts)


async def test_the_sdk_asks_with_what_the_files_say(redis: RedisProcess, mesh_file: Any) -> None:
    async with (
        serving(Role.PLANNER, COMPOSE[Role.PLANNER], mesh_file(), redis.url) as chassis,
        AsyncPlannerClient(chassis.admin_address) as client,
    ):
        asked = example_inputs()
        *_, plan = [event async for event in client.plan_cascade(asked, min_quality=85, gpus=8, max_tiers=1)]
        assert isinstance(plan, CascadePlan)
        assert plan.quality >= 85
        assert len(plan.tiers) == 1


@pytest.mark.slow
async def test_the_sdk_simulates_the_plan_that_it_was_given(redis: RedisProcess, mesh_file: Any) -> None:
    async with (
        serving(Role.PLANNER, COMPOSE[Role.PLANNER], mesh_file(), redis.url) as chassis,
        AsyncPlannerClient(chassis.admin_address) as client,
    ):
        asked = example_inputs()
        *progress, plan = [event async for event in client.plan_cascade(asked, min_quality=85, gpus=8)]
        assert all(isinstance(event, PlanProgress) for event in progress)
        assert isinstance(plan, CascadePlan)
        assert plan.quality >= 85
        groups = [tier.replicas for tier in plan.tiers]
        found = await client.simulate_deployment(asked, groups, [plan.tiers[0].threshold])
        assert found.end_to_end.p95 == plan.end_to_end_p95_s
        assert found.user_latency == plan.user_latency
        *_, pace = [
            event async for event in client.plan_cascade(asked, min_quality=85, gpus=8, objective="pace", percentile=90)
        ]
        assert isinstance(pace, CascadePlan)
        assert (pace.objective, pace.percentile) == ("pace", 90)
        assert pace.user_latency is not None
        assert 0 < pace.latency_s <= pace.user_latency.pace.p95


def test_the_sdk_refuses_what_no_request_can_say() -> None:
    asked = example_inputs()
    with pytest.raises(ValueError, match="no field named"):
        plan_request(dataclasses.replace(asked, cluster={"gpus": 3}), 85, None, "largest-tier", None, None, "at-most")
    with pytest.raises(ValueError, match="budget"):
        plan_request(asked, 85, None, "largest-tier", None, None, "all")
    with pytest.raises(ValueError, match="goal"):
        plan_request(asked, 85, None, "largest-tier", None, None, "at-most", "speed")
    with pytest.raises(ValueError, match="or both"):
        plan_request(asked, None, None, "largest-tier", None, None, "at-most")


def predicted(asked: pb.PlanningInputs) -> pb.PlanningInputs:
    """The inputs with predictions that know something of the scores."""
    rng = np.random.default_rng(6)
    for prompt in asked.workload.judged:
        prompt.predicted_scores.extend(np.clip(np.array(prompt.judge_scores) + rng.normal(0, 8, 3), 0, 100).round(1))
    return asked


@pytest.mark.slow
async def test_the_service_chooses_the_skip_rule_that_the_library_chooses(planner: Planner) -> None:
    """With `skip` the plan has the library's limits and is no worse than without; its simulation under them agrees."""
    asked = predicted(inputs())
    request = pb.PlanCascadeRequest(inputs=asked, min_quality=80, skip=True)
    plan = [e async for e in planner.PlanCascade(request)][-1].finished.plan
    site, demand = inputs_from_proto(asked)
    ours = plan_cascade(site, demand, min_quality=80, seed=1, skip=True)
    limits = [t.skip_below if t.HasField("skip_below") else None for t in plan.tiers]
    assert any(limit is not None for limit in limits)
    assert limits == [*ours.skip_below, None]
    assert (plan.quality, plan.latency_p95_s) == (ours.quality, ours.latency_p95_s)
    request.skip = False
    without = [e async for e in planner.PlanCascade(request)][-1].finished.plan
    assert not any(t.HasField("skip_below") for t in without.tiers)
    assert plan.latency_p95_s < without.latency_p95_s
    tiers = [
        pb.SimulatedTier(
            replicas=t.replicas, threshold=t.threshold if t.HasField("threshold") else None, skip_below=limit
        )
        for t, limit in zip(plan.tiers, limits, strict=True)
    ]
    replayed = await planner.SimulateDeployment(pb.SimulateDeploymentRequest(inputs=asked, tiers=tiers))
    assert replayed.end_to_end.p95 == plan.end_to_end_p95_s


AFTER = (8, 32)


def partly_scored(asked: pb.PlanningInputs) -> pb.PlanningInputs:
    """The inputs with bad answers of the first tier that are long, and scores of unfinished answers that tell bad ones."""
    rng = np.random.default_rng(7)
    asked.workload.early_after_tokens.extend(AFTER)
    for prompt in asked.workload.judged:
        prompt.output_tokens[0] *= 2 if prompt.judge_scores[0] < 60 else 1
        for tokens, score in zip(prompt.output_tokens, prompt.judge_scores, strict=True):
            parts = np.clip(score + rng.normal(0, 4, len(AFTER)), 0, 100).round(1)
            prompt.unfinished.add(scores=[part for after, part in zip(AFTER, parts, strict=True) if after < tokens])
    return asked


@pytest.mark.slow
async def test_the_service_fits_the_early_checks_that_the_library_fits(planner: Planner) -> None:
    """With `early_error` the plan has the library's checks and is better than without; its simulation with them agrees."""
    asked = partly_scored(inputs())
    request = pb.PlanCascadeRequest(inputs=asked, min_quality=75, early_error=0.1)
    plan = [e async for e in planner.PlanCascade(request)][-1].finished.plan
    site, demand = inputs_from_proto(asked)
    ours = plan_cascade(site, demand, min_quality=75, seed=1, early_error=0.1)
    found = [tuple((c.after_tokens, c.reject_below) for c in t.early.checks) for t in plan.tiers]
    assert any(found), plan.early_reason
    assert found == [*(tuple((c.after_tokens, c.reject_below) for c in rule.checks) for rule in ours.rules.early), ()]
    assert (plan.quality, plan.latency_p95_s) == (ours.quality, ours.latency_p95_s)
    outcomes = [o for o in ours.early if o.rule.checks]
    assert [
        (t.early.rejected_share, t.early.error, t.early.saved_share) for t in plan.tiers if t.HasField("early")
    ] == [(o.rejected, o.error, o.saved) for o in outcomes]
    request.ClearField("early_error")
    without = [e async for e in planner.PlanCascade(request)][-1].finished.plan
    assert not any(t.HasField("early") for t in without.tiers)
    assert plan.latency_p95_s < without.latency_p95_s
    tiers = [
        pb.SimulatedTier(
            replicas=t.replicas,
            threshold=t.threshold if t.HasField("threshold") else None,
            early_checks=t.early.checks,
        )
        for t in plan.tiers
    ]
    replayed = await planner.SimulateDeployment(pb.SimulateDeploymentRequest(inputs=asked, tiers=tiers))
    assert replayed.end_to_end.p95 == plan.end_to_end_p95_s
    for tier in tiers:
        tier.ClearField("early_checks")
    unchecked = await planner.SimulateDeployment(pb.SimulateDeploymentRequest(inputs=asked, tiers=tiers))
    assert unchecked.end_to_end.p95 != plan.end_to_end_p95_s


def refused(method: str, request: Any) -> list[str]:
    """The fields that a job names in the request. It runs in this process: how they reach the caller is tested below."""
    with pytest.raises(InvalidRequest) as caught:
        METHODS[method](request.SerializeToString(), print)
    return [problem.field for problem in caught.value.problems]


def three_tiers() -> list[pb.SimulatedTier]:
    group = pb.ReplicaGroup(tp=8, pp=1, count=1)
    judged = [pb.SimulatedTier(replicas=[group], threshold=50) for _ in range(2)]
    return [*judged, pb.SimulatedTier(replicas=[group])]


def test_what_early_checks_lack_is_named() -> None:
    bare, asked, long = inputs(), partly_scored(inputs()), partly_scored(inputs())
    of_trace = partly_scored(inputs())
    of_trace.workload.lengths = pb.LENGTH_SOURCE_TRACE
    long.workload.judged[3].output_tokens[1] = 8
    del long.workload.judged[3].unfinished[1].scores[1:]
    for of, error, field in (
        (long, 0.1, "inputs.workload.judged[3].unfinished[1].scores"),
        (bare, 0.1, "inputs.workload.early_after_tokens"),
        (asked, 1.0, "early_error"),
        (asked, float("nan"), "early_error"),
    ):
        assert refused("PlanCascade", pb.PlanCascadeRequest(inputs=of, min_quality=80, early_error=error)) == [field]
    for tier, checks, of, field in (
        (0, [(8, 101.0)], asked, "tiers[0].early_checks[0].reject_below"),
        (0, [(8, 5.0), (2**31, 5.0)], asked, "tiers[0].early_checks[1].after_tokens"),
        (0, [(32, 5.0), (8, 5.0)], asked, "tiers[0].early_checks"),
        (1, [(8, 5.0), (9, 5.0)], asked, "tiers[1].early_checks[1].after_tokens"),
        (2, [(8, 5.0)], asked, "tiers[2].early_checks"),
        (0, [(8, 5.0)], bare, "tiers[0].early_checks[0].after_tokens"),
        (0, [(8, 5.0)], of_trace, "inputs.workload.lengths"),
    ):
        tiers = three_tiers()
        tiers[tier].early_checks.extend(pb.EarlyCheck(after_tokens=n, reject_below=limit) for n, limit in checks)
        assert refused("SimulateDeployment", pb.SimulateDeploymentRequest(inputs=of, tiers=tiers)) == [field]


def test_what_a_skip_rule_lacks_is_named() -> None:
    bare, asked = inputs(), predicted(inputs())
    planned = pb.PlanCascadeRequest(inputs=bare, min_quality=80, skip=True)
    assert refused("PlanCascade", planned) == ["inputs.workload.judged"]
    for tier, limit, of, field in (
        (0, 101.0, asked, "tiers[0].skip_below"),
        (1, float("nan"), asked, "tiers[1].skip_below"),
        (2, 10.0, asked, "tiers[2].skip_below"),
        (0, 10.0, bare, "inputs.workload.judged"),
    ):
        tiers = three_tiers()
        tiers[tier].skip_below = limit
        assert refused("SimulateDeployment", pb.SimulateDeploymentRequest(inputs=of, tiers=tiers)) == [field]


async def test_a_bad_field_is_named_over_the_wire(planner: Planner) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await planner.SimulateDeployment(pb.SimulateDeploymentRequest(inputs=inputs()))
    told = errors.from_rpc(caught.value)
    assert isinstance(told, errors.InvalidRequestError)
    assert told.fields == {"tiers": "the cascade has 3, not 0"}
    with pytest.raises(aio.AioRpcError) as caught:
        await planner.PlanCascade(pb.PlanCascadeRequest(inputs=inputs(), min_quality=80, skip=True)).read()
    told = errors.from_rpc(caught.value)
    assert isinstance(told, errors.InvalidRequestError)
    assert list(told.fields) == ["inputs.workload.judged"]


def _break(path: str, value: Any) -> pb.PlanningInputs:
    made = inputs()
    exec(f"made.{path}" if value is None else f"made.{path} = value", {"made": made, "value": value})
    return made


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("cluster.gpu_name", "h900", "inputs.cluster.gpu_name"),
        ("cluster.ClearField('gpu_name')", None, "inputs.cluster.gpu"),
        ("cluster.gpu_spec.memory_gb", 80, "inputs.cluster.gpu_spec.memory_gb_per_s"),
        ("cluster.nodes", 0, "inputs.cluster.nodes"),
        ("cluster.node_link_gb_per_s", float("nan"), "inputs.cluster.node_link_gb_per_s"),
        ("cascade.tiers[1].model_name", "gpt-9", "inputs.cascade.tiers[1].model_name"),
        ("cascade.tiers[1].model_spec.layers", 3, "inputs.cascade.tiers[1].model_spec.hidden"),
        ("cascade.tiers[1].name", "small", "inputs.cascade"),
        ("cascade.judge_s", -1, "inputs.cascade.judge_s"),
        ("cascade.runtime.memory_share", 2, "inputs.cascade.runtime.memory_share"),
        ("cascade.tiers[0].measured.add(tp=1, pp=1, kv_tokens=9)", None, "inputs.cascade.tiers[0].measured[0].knot_s"),
        ("workload.trace.arrival_s[3]", float("inf"), "inputs.workload.trace.arrival_s"),
        ("workload.trace.input_tokens.pop()", None, "inputs.workload.trace.input_tokens"),
        ("workload.trace.output_tokens[7]", 0, "inputs.workload.trace.output_tokens[7]"),
        ("workload.trace.cached_tokens.append(5)", None, "inputs.workload.trace.cached_tokens"),
        ("workload.trace.cached_tokens.extend([99] * 9 + [100] * 291)", None, "inputs.workload.trace.cached_tokens[9]"),
        ("workload.ClearField('trace')", None, "inputs.workload.trace.arrival_s"),
        ("workload.ClearField('judged')", None, "inputs.workload.judged"),
        ("workload.judged[2].judge_scores[1]", 101, "inputs.workload.judged[2].judge_scores"),
        ("workload.judged[2].judge_scores[1]", float("nan"), "inputs.workload.judged[2].judge_scores"),
        ("workload.judged[3].predicted_scores.append(5)", None, "inputs.workload.judged[3].predicted_scores"),
        ("workload.judged[3].predicted_scores.extend([5, 5, 5])", None, "inputs.workload.judged[3].predicted_scores"),
        ("workload.judged[0].predicted_scores.extend([5, 5, 500])", None, "inputs.workload.judged[0].predicted_scores"),
        ("workload.early_after_tokens.extend([8, 8])", None, "inputs.workload.early_after_tokens"),
        ("workload.early_after_tokens.append(0)", None, "inputs.workload.early_after_tokens"),
        ("workload.early_after_tokens.extend(range(1, 1000))", None, "inputs.workload.early_after_tokens"),
        ("workload.early_after_tokens.append(8)", None, "inputs.workload.judged[0].unfinished"),
        ("workload.judged[3].unfinished.add(scores=[5])", None, "inputs.workload.judged[3].unfinished"),
        ("workload.judged[4].output_tokens.pop()", None, "inputs.workload.judged[4].output_tokens"),
        ("workload.rate", -1, "inputs.workload.rate"),
        ("workload.requests", 0, "inputs.workload.requests"),
        ("workload.requests", 301, "inputs.workload.requests"),
    ],
)
def test_every_unsound_input_is_named(path: str, value: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        inputs_from_proto(_break(path, value))
    assert field in [problem.field for problem in caught.value.problems]


@pytest.mark.parametrize("scores", [[5, 5, 5], [500], [float("nan")]])
def test_unsound_scores_of_unfinished_answers_are_named(scores: list[float]) -> None:
    made = partly_scored(inputs())
    made.workload.judged[3].unfinished[1].scores[:] = scores
    with pytest.raises(InvalidRequest) as caught:
        inputs_from_proto(made)
    assert [problem.field for problem in caught.value.problems] == ["inputs.workload.judged[3].unfinished[1].scores"]


def test_the_sdk_sends_scores_of_unfinished_answers_and_reads_early_checks() -> None:
    cluster = yaml.safe_load((ROOT / "examples" / "cluster-4x8-h100.yaml").read_text())
    cascade = yaml.safe_load((ROOT / "examples" / "deepseek-cascade.yaml").read_text())
    cascade = {**cascade, "tiers": cascade["tiers"][:2]}
    prompts = [
        JudgedPrompt(100, (50, 60), (60.0, 80.0), (), ((40.0, 45.0), ())),
        JudgedPrompt(200, (20, 80), (90.0, 95.0), (), ((70.0,), ())),
    ]
    asked = PlanningInputs(cluster, cascade, [(0.0, 10, 10), (1.0, 10, 10)], prompts, early_after_tokens=(8, 32))
    request = plan_request(asked, 85, None, "largest-tier", None, None, "at-most", early_error=0.1)
    assert request.early_error == 0.1
    parts = inputs_from_proto(request.inputs)[1].judged.parts
    assert parts is not None
    assert parts.after_tokens == (8, 32)
    np.testing.assert_array_equal(parts.scores[:, 0], [[40, 45], [70, np.nan]])
    assert np.isnan(parts.scores[:, 1]).all()
    groups = [[ReplicaGroup(1, 1, 1)]] * 2
    simulated = planning.simulate_request(asked, groups, [70.0], early_checks=[[EarlyCheck(8, 5.0)]])
    assert [[(c.after_tokens, c.reject_below) for c in t.early_checks] for t in simulated.tiers] == [[(8, 5.0)], []]
    with pytest.raises(ValueError, match="early_checks: must have one entry for each tier but the last, 1, not 2"):
        planning.simulate_request(asked, groups, [70.0], early_checks=[[], []])
    with pytest.raises(ValueError, match="thresholds: must have one entry for each tier but the last, 1, not 0"):
        planning.simulate_request(asked, groups, [])
    early = pb.PlannedEarlyChecks(checks=[pb.EarlyCheck(after_tokens=8, reject_below=5)], error=0.01, saved_share=0.2)
    planned = pb.CascadePlan(tiers=[pb.PlannedTier(name="small", early=early), pb.PlannedTier(name="large")])
    response = pb.PlanCascadeResponse(finished=pb.PlanFinished(plan=planned))
    plan = planning.plan_event_from_proto(response)
    assert isinstance(plan, CascadePlan)
    assert plan.tiers[0].early == PlannedEarlyChecks((EarlyCheck(8, 5.0),), 0, None, 0.01, 0.2, 0.0)
    assert plan.tiers[1].early is None
