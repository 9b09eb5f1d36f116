"""Several planners of one mesh: one leads and publishes by itself, another takes over when it ends."""

import asyncio
import dataclasses
import logging
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from penstock import AsyncPlannerClient
from penstock.planner_service.live import replanner
from penstock.planner_service.live.solver_pool import SolverFailed, SolverPool
from penstock.services.clock import SystemClock
from penstock.services.domain.instances import Role
from penstock.services.domain.workload import RequestRecord, TierVisit, Window
from penstock.services.mesh_file import load_mesh_file
from penstock.services.state.connection import StateUnavailable, connect
from penstock.services.state.keys import Keys
from penstock.services.state.leadership import Leadership, NotLeading
from penstock.services.state.plans import PlanStore
from penstock.services.state.workload import WorkloadStore
from penstock.types.plans import Plan, TierPlan
from tests.conftest import MeshFileMaker
from tests.support.mesh import COMPOSE, TestMesh
from tests.support.questions import replan_question
from tests.support.services import RedisProcess, serving
from tests.support.virtual_clock import VirtualClock

PLAN = Plan(0, (TierPlan("small", "m", 50.0, 1), TierPlan("large", "n", None, 1)))
WINDOW_S = 0.25
TAKEN_OVER_S = 10.0
"""From the end of the leader to a plan of the other, at most."""
WAIT_S = 120.0


@asynccontextmanager
async def client_of(redis: RedisProcess) -> AsyncIterator[Redis]:
    client = connect(redis.url)
    try:
        yield client
    finally:
        await client.aclose()


async def test_one_leads_until_it_lets_go(redis: RedisProcess) -> None:
    async with client_of(redis) as client:
        keys, clock = Keys("one-leads"), SystemClock()
        a, b = Leadership(client, keys, "a", clock), Leadership(client, keys, "b", clock)
        assert [await a.hold(), await b.hold(), await a.hold()] == [True, False, True]
        await b.release()
        assert [a.leads, b.leads, await b.hold()] == [True, False, False]
        await a.release()
        assert [a.leads, await b.hold(), await a.hold()] == [False, True, False]


async def test_a_lease_that_is_not_renewed_ends_here_and_in_redis(redis: RedisProcess) -> None:
    """Here without a word from Redis: so a planner that was suspended, or is cut off, does not continue."""
    async with client_of(redis) as client:
        keys, clock = Keys("lease-ends"), VirtualClock(100.0)
        a, b = Leadership(client, keys, "a", clock, 0.2), Leadership(client, keys, "b", clock)
        assert await a.hold()
        clock.sleep(0.3)
        assert not a.leads
        async with asyncio.timeout(WAIT_S):
            while not await b.hold():
                await asyncio.sleep(0.01)
        assert not await a.hold()


async def test_who_does_not_lead_any_more_publishes_nothing(redis: RedisProcess) -> None:
    """Redis decides, whatever the planner believes of itself."""
    async with client_of(redis) as client:
        keys = Keys("fenced")
        store, a = PlanStore(client, keys), Leadership(client, keys, "a", SystemClock())
        with pytest.raises(NotLeading, match="planner none leads, not a"):
            await store.publish(PLAN, leader="a")
        assert await a.hold()
        assert (await store.publish(PLAN, leader="a")).revision == 1
        await client.set(keys.plan_leader, "b")
        with pytest.raises(NotLeading, match="planner b leads, not a"):
            await store.publish(PLAN, leader="a")
        assert (await store.publish(PLAN)).revision == 2, "what an operator asks for, any planner publishes"


async def test_without_redis_no_planner_begins_to_lead(own_redis: RedisProcess) -> None:
    async with client_of(own_redis) as client:
        clock = VirtualClock(100.0)
        a = Leadership(client, Keys("m"), "a", clock)
        assert await a.hold()
        own_redis.stop()
        with pytest.raises(StateUnavailable):
            await a.hold()
        assert a.leads
        clock.sleep(5.0)
        assert not a.leads


EASY, HARD = (85,), (45,)
"""Mean scores of the windows of a workload."""


def workload(start_s: float, means: tuple[int, ...]) -> list[Window]:
    """Windows from `start_s` (Unix time) on."""
    windows = []
    for at, mean in enumerate(means):
        begin_s = start_s + at * WINDOW_S
        scores = [min(100.0, max(0.0, mean + (n * 37) % 41 - 20)) for n in range(50)]
        records = [
            RequestRecord(begin_s, 400 + 10 * (n % 7), (TierVisit("small", 200 + 9 * (n % 11), score),))
            for n, score in enumerate(scores)
        ]
        windows.append(Window(begin_s, WINDOW_S, (1,) * 10, tuple(records)))
    return windows


@pytest.fixture
def replanning(mesh_file: MeshFileMaker, tmp_path: Path) -> Path:
    replan_question(tmp_path, min_quality=80, requests=100)
    replan = {"enabled": True, "question": str(tmp_path / "question.yaml"), "window_s": WINDOW_S}
    return mesh_file(planner={"replan": replan})


async def test_only_the_leader_plans_again_and_the_other_does_what_it_has_left(
    redis: RedisProcess, replanning: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both see the drift. The leader ends without a plan for it, as if it had been killed while it planned."""
    pools = list[SolverPool]()

    async def failing(
        pool: SolverPool, method: str, payload: bytes, limit_s: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        pools.append(pool)
        if pool.pids == set():
            raise SolverFailed("killed")
        yield b""

    def drifts() -> int:
        return sum("the workload has drifted" in record.message for record in caplog.records)

    monkeypatch.setattr(SolverPool, "run", failing)
    monkeypatch.setattr(replanner, "HELD_S", 1000.0)
    caplog.set_level(logging.INFO)
    keys, compose = Keys(load_mesh_file(replanning).name), COMPOSE[Role.PLANNER]
    first = serving(Role.PLANNER, compose, replanning, redis.url, instance_id="a")
    second = serving(Role.PLANNER, compose, replanning, redis.url, instance_id="b")
    async with asyncio.timeout(WAIT_S), client_of(redis) as client, AsyncExitStack() as leading:
        await leading.enter_async_context(first)
        await until_leads(client, keys, b"a")
        async with second as waits, AsyncPlannerClient(waits.admin_address) as planner:
            plan = await newer(planner, 0)
            plan = await planner.set_plan(dataclasses.replace(plan, note="by hand"))  # at any planner
            for window in workload(plan.created_at + 0.1, EASY * 4 + HARD * 4):
                await WorkloadStore(client, keys).append(window)
            while drifts() < 2 or not pools:
                await asyncio.sleep(0.02)
            assert len(pools) == 1
            stopped_s = time.monotonic()
            await leading.aclose()
            await until_leads(client, keys, b"b")
            assert time.monotonic() - stopped_s <= TAKEN_OVER_S
            while len(pools) < 2:
                await asyncio.sleep(0.02)
            assert pools[0] is not pools[1]


@pytest.mark.slow
async def test_a_killed_leader_is_replaced(redis: RedisProcess, mesh_file: MeshFileMaker, tmp_path: Path) -> None:
    """Two processes; Redis loses the plan as the leader is killed, and the other publishes it in time."""
    file = mesh_file()
    keys = Keys(load_mesh_file(file).name)
    async with asyncio.timeout(WAIT_S), client_of(redis) as client:
        store = PlanStore(client, keys)
        with planner_process("a", file, redis.url, tmp_path) as leader:
            await until_leads(client, keys, b"a")
            with planner_process("b", file, redis.url, tmp_path):
                while "planner a leads, this one waits" not in (tmp_path / "b.log").read_text():
                    await asyncio.sleep(0.02)
                while await store.current() is None:
                    await asyncio.sleep(0.02)
                leader.kill()
                killed_s = time.monotonic()
                await client.delete(keys.plan_revision, keys.plan(1))
                while await store.current() is None:
                    await asyncio.sleep(0.02)
                assert time.monotonic() - killed_s <= TAKEN_OVER_S
                assert await client.get(keys.plan_leader) == b"b"
                assert "planner b leads" in (tmp_path / "b.log").read_text()


async def test_who_leads_is_seen_and_only_the_leader_says_what_should_run(
    redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    """In the status and the metrics: autoscalers may add up what several planners export."""
    async with TestMesh(mesh_file(), redis.url) as mesh:

        def exported(name: str) -> tuple[str, int]:
            """Whether the planner says that it leads, and for how many tiers it has a count."""
            with urllib.request.urlopen(f"http://{mesh.parts[name].telemetry.metrics_address}/metrics") as response:
                text = response.read().decode()
            (leads,) = re.findall(r"^penstock_planner_leads\S* (\S+)$", text, re.MULTILINE)
            return leads, len(re.findall(r"^penstock_desired_replicas\S*{", text, re.MULTILINE))

        for role, name in ((Role.PLANNER, "a"), (Role.PLANNER, "b"), (Role.ROUTER, "router-0")):
            await mesh.start(role, name)
        await mesh.until(lambda s: s.plan_revision > 0 and [i.instance_id for i in s.instances if i.leads] == ["a"])
        shown = [await asyncio.to_thread(exported, name) for name in ("a", "b")]
        assert shown == [("1.0", 2), ("0.0", 0)]
        await mesh.stop("a")
        await mesh.until(lambda s: [i.instance_id for i in s.instances if i.leads] == ["b"])
        assert await asyncio.to_thread(exported, "b") == ("1.0", 2)


async def until_leads(client: Redis, keys: Keys, name: bytes) -> None:
    while await client.get(keys.plan_leader) != name:
        await asyncio.sleep(0.02)


@contextmanager
def planner_process(name: str, mesh_file: Path, redis_url: str, folder: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A planner as a process of its own, whose log is NAME.log; killed at the end."""
    settings = {"MESH_FILE": mesh_file, "REDIS_URL": redis_url, "INSTANCE_ID": name}
    environment = os.environ | {f"PENSTOCK_{setting}": str(value) for setting, value in settings.items()}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.planner_service"], env=environment, stdout=log, stderr=log
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


async def newer(planner: AsyncPlannerClient, revision: int) -> Plan:
    """The plan after a revision, as soon as there is one."""
    async with asyncio.timeout(WAIT_S):
        async for plan in planner.watch_plan(after_revision=revision):
            return plan
    raise AssertionError("the planner ended")
