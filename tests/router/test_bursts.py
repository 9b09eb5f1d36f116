"""Thresholds that give way under a burst: real services, simulated engines, one mesh with two routers."""

import asyncio
from dataclasses import replace
from typing import Any

from penstock import (
    Accepted,
    AsyncClient,
    AsyncPlannerClient,
    BurstLadder,
    BurstStep,
    BurstThreshold,
    Escalated,
    Judged,
    Plan,
)
from penstock.router_service.siblings.counters import total
from penstock.services.acceptance.bursts import tie_draw
from penstock.types.mesh_status import BurstCounts, ProcessCounters
from tests.router.test_request_traces import SERVICES, trace_of
from tests.support.mesh import TestMesh

FAST = {"overhead_ms": 0.2, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 6}
MESH = {
    "tiers": [
        {"name": "small", "model": "sim-small", "threshold": 100, "simulated": FAST},
        {"name": "large", "model": "sim-large", "simulated": FAST},
    ],
    "router": {"replicas": 2, "burst_window_s": 30, "trace_per_s": 100},
}
ROUTERS = 2
CALM_PER_S = 2.0
SHARE = 0.5
TIED = "tied"


def ladder(*steps: tuple[BurstThreshold, float, float], mean: float = 80.0) -> BurstLadder:
    """Steps of (threshold of small, quality, rate per second)."""
    return BurstLadder(mean, tuple(BurstStep((rule,), quality, rate, "large", 1.0) for rule, quality, rate in steps))


OWN = BurstThreshold(100.0)
PLAIN = ladder((OWN, 90.0, CALM_PER_S), (BurstThreshold(0.0), 85.0, 1000.0))


def of_router(mesh: TestMesh, index: int, **options: Any) -> AsyncClient:
    router = mesh.parts[f"router-{index}"]
    return AsyncClient([router.address], admin=[router.admin_address], timeout_s=60, silence_s=60, **options)


async def publish(mesh: TestMesh, burst: BurstLadder | None) -> Plan:
    """Publish the plan with a ladder, and wait until both routers have it."""
    async with AsyncPlannerClient(mesh.parts["planner-0"].admin_address) as planner:
        published = await planner.set_plan(replace(await planner.get_plan(), burst=burst))
    for index in range(2):
        async with of_router(mesh, index) as client:
            while (await client.status()).plan_revision < published.revision:
                await asyncio.sleep(0.01)
    return published


async def events(client: AsyncClient, prompt: str = "hello", **options: Any) -> list[Any]:
    return [event async for event in client.stream(prompt, temperature=0.0, **options)]


async def burst_of(client: AsyncClient) -> Any:
    burst = (await client.status()).burst
    assert burst is not None
    return burst


async def test_thresholds_give_way_to_a_burst_at_all_routers_and_come_back(mesh: TestMesh) -> None:
    """Every request says which step it took. A router without requests of its own follows what the other one counts."""
    published = await publish(mesh, PLAIN)
    assert published.burst == PLAIN
    async with of_router(mesh, 0) as client, of_router(mesh, 1) as other:
        first = await events(client)
        assert next(e for e in first if isinstance(e, Accepted)).burst_step == 0
        assert next(e for e in first if isinstance(e, Judged)).threshold == 100.0
        assert next(e for e in first if isinstance(e, Escalated)).reason == "score_below_threshold"
        assert (await burst_of(client)).step == 0
        async with asyncio.timeout(60):
            while not all([(await burst_of(each)).step for each in (client, other)]):
                await events(client)
        assert (await burst_of(other)).arrivals_per_s > 0, "of requests that the first router got"
        for each in (client, other):
            during = await events(each)
            assert next(e for e in during if isinstance(e, Accepted)).burst_step == 1
            assert not any(isinstance(e, Judged | Escalated) for e in during), "all are accepted, without the judge"
        shown = await burst_of(client)
        assert (shown.step, shown.steps, shown.mean_quality, shown.out_of_budget) == (1, 2, 80.0, False)
        assert 85.0 < shown.window_quality < 90.0, "of the requests of both steps"
        assert [(c.before, c.after, c.reason) for c in shown.last_changes] == [(0, 1, "load")]
        reply = await client.generate("hello", temperature=0.0, trace=True)
        trace = await trace_of(mesh, reply.trace_id, SERVICES - {"judge"})
        (tier,) = [span for span in trace.spans if span.name == "tier small"]
        assert tier.attributes["penstock.burst_step"] == "1"
        page = await mesh.metrics()
        assert "penstock_router_burst_step" in page
        assert any(
            line.startswith("penstock_router_burst_changes_total{") and 'penstock_reason="load"' in line
            for line in page.splitlines()
        )
        async with asyncio.timeout(120):
            while (await burst_of(client)).step > 0:
                await asyncio.sleep(0.1)
        assert (await burst_of(client)).last_changes[0].reason == "calm"
        after = await events(client)
        assert next(e for e in after if isinstance(e, Accepted)).burst_step == 0


async def test_a_request_that_names_a_tier_takes_no_step(mesh: TestMesh) -> None:
    await publish(mesh, PLAIN)
    async with of_router(mesh, 0) as client:
        assert next(e for e in await events(client, model="small") if isinstance(e, Accepted)).burst_step is None
        assert (await client.status()).burst is not None
    await publish(mesh, None)
    async with of_router(mesh, 0) as client:
        assert next(e for e in await events(client) if isinstance(e, Accepted)).burst_step is None
        assert (await client.status()).burst is None


async def test_a_spent_budget_brings_the_plans_own_thresholds_back(mesh: TestMesh) -> None:
    """The load is over the first step all the time; what calm requests have not earned is not spent."""
    await publish(mesh, ladder((OWN, 90.0, 0.001), (BurstThreshold(0.0), 70.0, 1000.0), mean=85.0))
    async with of_router(mesh, 0) as client:
        steps = [next(e for e in await events(client) if isinstance(e, Accepted)).burst_step for _ in range(40)]
        shown = await burst_of(client)
    assert steps[:3] == [0, 0, 0], "nothing is earned yet"
    assert 1 in steps
    assert shown.window_quality >= 85.0
    assert any(change.reason == "budget_spent" for change in shown.last_changes)


async def test_ties_are_broken_by_the_requests_own_seed(mesh: TestMesh) -> None:
    """Answers that score exactly the threshold: a share of them is accepted, the same ones whenever a seed is used again."""
    await publish(mesh, None)
    async with of_router(mesh, 0) as client:
        score = next(e for e in await events(client, TIED, seed=1) if isinstance(e, Judged)).score
        assert score is not None
        assert 0 < score < 100
        rule = BurstThreshold(score, SHARE)
        await publish(mesh, ladder((OWN, 90.0, 0.001), (rule, 85.0, 1000.0)))
        seen = []
        for seed in (*range(1, 13), 3):
            received = await events(client, TIED, seed=seed)
            judged = next(e for e in received if isinstance(e, Judged))
            assert (judged.score, judged.threshold) == (score, score)
            assert judged.accepted == (tie_draw(seed, 0) < SHARE)
            reasons = [e.reason for e in received if isinstance(e, Escalated)]
            assert reasons == ([] if judged.accepted else ["tie_not_accepted"])
            seen.append(judged.accepted)
        assert {True, False} == set(seen)
        assert seen[2] == seen[-1]


def test_the_processes_of_a_router_add_up() -> None:
    """The step that most requests may take is the highest; the mean is of all requests."""
    one = ProcessCounters(burst=BurstCounts(1, 0.4, False, 3, 10, 850.0))
    two = ProcessCounters(burst=BurstCounts(0, 0.9, True, 1, 30, 2700.0))
    both = total([one, two, ProcessCounters()]).burst
    assert both == BurstCounts(1, 0.4, True, 4, 40, 3550.0)
    assert both.window_quality == 88.75
    assert total([ProcessCounters()]).burst is None
    assert BurstCounts().window_quality is None
