"""Requests through the whole mesh: real services and Redis, simulated engines."""

import asyncio
from typing import Any

import pytest
from grpc import aio

import penstock
from penstock import (
    Accepted,
    DeadlineError,
    Escalated,
    Finished,
    InvalidRequestError,
    Judged,
    NotFoundError,
    TierStarted,
    Tokens,
)
from penstock.services.domain.instances import Role
from tests.conftest import MeshRunner
from tests.support.mesh import TestMesh

# The simulated model states probability 0.9 for every token: the confidence scorer gives 90.
STANDS, FALLS = 80, 95
MESH = {
    "tiers": [
        {"name": "small", "model": "sim-s", "threshold": STANDS, "workers": 2},
        {"name": "medium", "model": "sim-m", "threshold": FALLS},
        {"name": "large", "model": "sim-l", "max_context_tokens": 600},
    ]
}


async def set_thresholds(mesh: TestMesh, small: float, medium: float) -> int:
    async with penstock.AsyncPlannerClient(mesh.parts["planner-0"].admin_address) as planner:
        plan = await planner.get_plan()
        tiers = [
            penstock.TierPlan(t.name, t.model, {"small": small, "medium": medium}.get(t.name), t.instances)
            for t in plan.tiers
        ]
        made = await planner.set_plan(penstock.Plan(tiers=tuple(tiers)))
    await mesh.until(lambda s: s.plan_revision >= made.revision)
    return made.revision


async def test_an_answer_that_is_good_enough_stands(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        events = [event async for event in client.stream("hello", temperature=0)]
    assert isinstance(events[0], Accepted)
    judged = [e for e in events if isinstance(e, Judged)]
    assert [(j.tier, j.accepted, round(j.score or 0)) for j in judged] == [("small", True, 90)]
    assert not any(isinstance(e, Escalated) for e in events)
    done = events[-1]
    assert isinstance(done, Finished)
    assert done.tier == "small"
    assert [t.tier for t in done.tiers] == ["small"]
    assert done.ttft_s is not None
    first_tokens = next(i for i, e in enumerate(events) if isinstance(e, Tokens))
    assert first_tokens > events.index(judged[0]), "held until judged"


async def test_what_falls_short_escalates_to_the_last_tier_and_streams_live(mesh: TestMesh) -> None:
    await set_thresholds(mesh, FALLS, FALLS)
    async with mesh.client() as client:
        events = [event async for event in client.stream("hello", temperature=0)]
    tiers = [e.tier for e in events if isinstance(e, TierStarted)]
    assert tiers == ["small", "medium", "large"]
    escalations = [(e.from_tier, e.to_tier, e.reason) for e in events if isinstance(e, Escalated)]
    assert escalations == [
        ("small", "medium", "score_below_threshold"),
        ("medium", "large", "score_below_threshold"),
    ]
    assert {e.tier for e in events if isinstance(e, Tokens)} == {"large"}
    done = events[-1]
    assert isinstance(done, Finished)
    assert [(t.tier, t.accepted) for t in done.tiers] == [("small", False), ("medium", False), ("large", True)]
    assert all(round(t.score or 0) == 90 for t in done.tiers[:2])
    await set_thresholds(mesh, STANDS, FALLS)


async def test_a_tier_by_name_answers_alone(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        for tier in ("small", "medium", "large"):
            reply = await client.generate("hello", model=tier, temperature=0)
            assert reply.tier == tier
            assert [t.tier for t in reply.tiers] == [tier]
            assert reply.tiers[0].score is None
        models = await client.models()
    assert [(m.id, m.cascade) for m in models] == [
        ("cascade", True),
        ("small", False),
        ("medium", False),
        ("large", False),
    ]


async def test_tokens_come_once_and_in_order(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        replies = await asyncio.gather(*(client.generate(f"prompt {i}", temperature=0) for i in range(40)))
        again = await asyncio.gather(*(client.generate(f"prompt {i}", temperature=0) for i in range(40)))
        at = 0
        async for event in client.stream("hello", model="large", temperature=0):
            if isinstance(event, Tokens):
                assert event.offset == at
                at += len(event.token_ids)
    assert [r.text for r in replies] == [r.text for r in again]
    assert len({r.text for r in replies}) > 1
    for reply in replies:
        assert reply.usage.output_tokens == len(reply.token_ids)


async def test_logprobs_are_told_only_where_asked_for(mesh: TestMesh) -> None:
    """The judge's scorer needs them; the client does not see them for that."""
    async with mesh.client() as client:
        assert (await client.generate("hello", temperature=0)).logprobs == ()
        asked = await client.generate("hello", temperature=0, top_logprobs=2)
    assert len(asked.logprobs) == len(asked.token_ids)
    assert all(len(p.top) == 2 for p in asked.logprobs)


async def test_unsound_requests_are_refused_by_field(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate([{"role": "robot", "content": "x"}], temperature=9, top_p=0, max_tokens=0)
        assert set(caught.value.fields) == {
            "prompt.chat.messages[0].role",
            "sampling.temperature",
            "sampling.top_p",
            "sampling.max_tokens",
        }
        with pytest.raises(NotFoundError, match="there are cascade, small, medium, large"):
            await client.generate("hello", model="huge")
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate("hello", priority=1000)
        assert set(caught.value.fields) == {"priority"}


async def test_a_prompt_too_long_for_a_tier_escalates_and_too_long_for_all_is_refused(run_mesh: MeshRunner) -> None:
    tiers = [
        {"name": "short", "model": "s", "threshold": STANDS, "max_context_tokens": 64},
        {"name": "long", "model": "l", "max_context_tokens": 256},
    ]
    async with run_mesh(tiers) as mesh, mesh.client() as client:
        events = [e async for e in client.stream("x" * 100, temperature=0)]
        assert [(e.to_tier, e.reason) for e in events if isinstance(e, Escalated)] == [("long", "prompt_too_long")]
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate("x" * 400)
        assert caught.value.reason == "PROMPT_TOO_LONG"
        assert list(caught.value.fields) == ["prompt"]


async def test_the_deadline_ends_a_request_everywhere(run_mesh: MeshRunner) -> None:
    slow = {"overhead_ms": 200.0, "reply_tokens": 10_000}
    tiers = [{"name": "slow", "model": "s", "simulated": slow}]
    async with run_mesh(tiers) as mesh, mesh.client() as client:
        with pytest.raises(DeadlineError):
            await client.generate("hello", timeout_s=1.0)
        await mesh.until(lambda s: s.active == 0 and s.tiers[0].running == 0)


async def test_cancelling_frees_the_engine(run_mesh: MeshRunner) -> None:
    """Long before the reply would end."""
    slow = {"overhead_ms": 20.0, "reply_tokens": 100_000}
    tiers = [{"name": "slow", "model": "s", "simulated": slow}]
    async with run_mesh(tiers) as mesh, mesh.client() as client:
        events: Any = client.stream("hello", max_tokens=8_000)
        async for event in events:
            if isinstance(event, Tokens):
                break
        await events.aclose()
        await mesh.until(lambda s: s.active == 0 and s.tiers[0].running == 0)


async def test_a_full_tier_makes_requests_wait_not_fail(run_mesh: MeshRunner) -> None:
    """More requests than all places of the tier: each gets its answer."""
    tiers = [{"name": "tiny", "model": "s", "max_running": 2, "max_queued": 1, "workers": 2}]
    async with run_mesh(tiers) as mesh, mesh.client() as client:
        replies = await asyncio.gather(*(client.generate(f"p{i}", temperature=0) for i in range(30)))
        assert len(replies) == 30
        assert (await client.status()).failed == 0


async def test_routers_follow_a_new_plan_without_dropping_a_request(mesh: TestMesh) -> None:
    """While requests run, thresholds change five times; every request ends well under the plan it began with."""
    async with mesh.client() as client:
        stop = asyncio.Event()
        revisions: set[int] = set()

        async def ask() -> int:
            count = 0
            while not stop.is_set():
                async for event in client.stream("hello", temperature=0):
                    match event:
                        case Accepted():
                            revisions.add(event.plan_revision)
                        case Finished():
                            count += 1
            return count

        failed_before = (await client.status()).failed
        askers = [asyncio.create_task(ask()) for _ in range(8)]
        last = 0
        for i in range(5):
            last = await set_thresholds(mesh, FALLS if i % 2 else STANDS, STANDS)
        stop.set()
        counts = await asyncio.gather(*askers)
        assert sum(counts) >= 5
        assert len(revisions) >= 3
        assert (await client.status()).plan_revision == last
        assert (await client.status()).failed == failed_before
    await set_thresholds(mesh, STANDS, FALLS)


def stub_of(module: Any, name: str, channel: aio.Channel) -> Any:
    """A stub of grpc's own packages, whose types know blocking channels only."""
    return getattr(module, name)(channel)


async def test_reflection_and_health_answer(mesh: TestMesh) -> None:
    """What grpcurl and a load balancer ask."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    for name, services in (
        ("router-0", {"penstock.router.v1.RouterService", "penstock.router.v1.MeshService"}),
        ("worker-small-0", {"penstock.worker.v1.WorkerService"}),
        ("judge-0", {"penstock.judge.v1.JudgeService"}),
        ("planner-0", {"penstock.planner.v1.PlannerService"}),
    ):
        async with aio.insecure_channel(mesh.parts[name].admin_address) as channel:
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            call = stub_of(reflection_pb2_grpc, "ServerReflectionStub", channel).ServerReflectionInfo(iter([ask]))
            answer = await call.read()
            assert services <= {s.name for s in answer.list_services_response.service}
            for service in ("", *services):
                health = await stub_of(health_pb2_grpc, "HealthStub", channel).Check(
                    health_pb2.HealthCheckRequest(service=service)
                )
                assert health.status == health_pb2.HealthCheckResponse.SERVING
            symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol=next(iter(services)))
            call = stub_of(reflection_pb2_grpc, "ServerReflectionStub", channel).ServerReflectionInfo(iter([symbol]))
            assert (await call.read()).file_descriptor_response.file_descriptor_proto


async def test_a_tier_without_workers_is_skipped_but_the_last_is_waited_for(mesh: TestMesh) -> None:
    """The last test of the module: it stops workers."""
    await mesh.stop("worker-small-0")
    await mesh.stop("worker-small-1")
    await mesh.until(lambda s: s.tiers[0].live_instances == 0)
    async with mesh.client() as client:
        events = [e async for e in client.stream("hello", temperature=0)]
        first = next(e for e in events if isinstance(e, Escalated))
        assert (first.from_tier, first.to_tier, first.reason) == ("small", "medium", "tier_unavailable")
        await mesh.stop("worker-large-0")
        await mesh.until(lambda s: s.tiers[2].live_instances == 0)
        waiting = asyncio.create_task(client.generate("hello", model="large", temperature=0))
        await asyncio.sleep(0)
        await mesh.start(Role.WORKER, "worker-large-0", tier="large")
        assert (await waiting).tier == "large"
