"""Parts that stop in an orderly way finish what they have; the mesh goes on. In the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock import AsyncClient, AsyncPlannerClient
from penstock.proto.worker.v1 import worker_pb2, worker_pb2_grpc
from penstock.services.domain.instances import Role
from penstock.services.state.connection import connect
from penstock.services.state.plans import PlanStore
from penstock.worker_service import servicer as worker_servicer
from tests.conftest import MeshFileMaker
from tests.support.mesh import TestMesh, running_mesh
from tests.support.read_stream import ReadStream
from tests.support.services import RedisProcess
from tests.support.simulated_text import ENDLESS, simulated_texts


async def plan_is_back(mesh: TestMesh, redis: RedisProcess) -> None:
    """Return once Redis holds the plan again."""
    store = PlanStore(connect(redis.url), mesh.router.keys)
    async with asyncio.timeout(60):
        while await store.current() is None:
            await asyncio.sleep(0.05)


SLOW = {"overhead_ms": 10.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
TOKENS = 80  # of a reply: 0.8 s
DRAIN_S = 120.0  # replies have all the time that they need, also where the machine has other work
ONE_ATTEMPT = {"grpc_port": 0, "http_port": 0, "max_attempts": 1}
TIERS = [{"name": "only", "model": "sim", "workers": 2, "simulated": SLOW}]


async def begun(client: AsyncClient, prompts: list[str], count: int) -> list[asyncio.Task[ReadStream]]:
    """Start a reply to each prompt; return once so many of them have tokens."""
    streams = [ReadStream(prompt) for prompt in prompts]
    replies = [
        asyncio.create_task(stream.read(client.stream(stream.prompt, temperature=0, max_tokens=TOKENS)))
        for stream in streams
    ]
    while sum(stream.tokens > 0 for stream in streams) < count:
        await asyncio.sleep(0.002)
    return replies


@pytest.fixture
async def mesh(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[TestMesh]:
    async with running_mesh(mesh_file(TIERS), redis.url, drain_s=DRAIN_S) as running:
        yield running


@pytest.fixture
async def strict_mesh(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[TestMesh]:
    """A reply gets one attempt: whatever costs one fails it."""
    async with running_mesh(mesh_file(TIERS, router=ONE_ATTEMPT), redis.url, drain_s=DRAIN_S) as running:
        yield running


async def test_a_drain_restarts_no_reply_and_the_worker_gets_no_new_ones(strict_mesh: TestMesh) -> None:
    """Replies that run when a worker is told to stop end there, or move on with their KV; one that is still on its way there
    is refused and starts at the other worker. No attempt is spent on any of it, and no token is lost, doubled or changed."""
    mesh = strict_mesh
    async with mesh.client() as client:
        prompts = [f"prompt {i}" for i in range(12)]
        expected = simulated_texts(dict.fromkeys(prompts, TOKENS))
        running = await begun(client, prompts, 1)
        await mesh.stop("worker-only-0")
        replies = await asyncio.gather(*running)
        assert {reply.prompt: reply.text for reply in replies} == expected
        assert {change.reason for reply in replies for change in reply.changes} <= {"draining"}
        after = await asyncio.gather(*(client.generate(f"later {i}", max_tokens=TOKENS) for i in range(6)))
        assert {t.instance_id for r in after for t in r.tiers} == {"worker-only-1"}


async def test_a_reply_that_a_draining_worker_refuses_runs_elsewhere_at_no_cost(
    own_redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    """The router has not heard of the drain, here because Redis is gone: it learns of it by the refusals."""
    from grpc import aio

    async with running_mesh(mesh_file(TIERS, router=ONE_ATTEMPT), own_redis.url) as mesh, mesh.client() as client:

        async def served_by() -> list[str]:
            replies = await asyncio.gather(*(client.generate(f"prompt {i}", max_tokens=TOKENS) for i in range(6)))
            return [t.instance_id for r in replies for t in r.tiers]

        own_redis.stop()
        await mesh.until(lambda s: not s.connected)
        assert set(await served_by()) == {"worker-only-0", "worker-only-1"}
        async with aio.insecure_channel(mesh.parts["worker-only-0"].admin_address) as channel:
            await worker_pb2_grpc.WorkerServiceStub(channel).Drain(worker_pb2.DrainRequest(), timeout=60)
        assert await served_by() == ["worker-only-1"] * 6


async def test_a_drain_cut_short_hands_its_replies_to_another_worker(
    mesh: TestMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the deadline cuts off goes on elsewhere at the same token."""
    from grpc import aio

    monkeypatch.setattr(worker_servicer, "CUT_OFF_MARGIN_S", 2 * DRAIN_S)  # no time is left to drain
    async with mesh.client() as client, aio.insecure_channel(mesh.parts["worker-only-0"].admin_address) as channel:
        prompts = [f"prompt {i}" for i in range(8)]
        expected = simulated_texts(dict.fromkeys(prompts, TOKENS))
        running = await begun(client, prompts, len(prompts))
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        answer = await stub.Drain(worker_pb2.DrainRequest(), timeout=DRAIN_S)
        assert answer.cut_off_count > 0
        assert {reply.prompt: reply.text for reply in await asyncio.gather(*running)} == expected


async def test_redis_lost_with_everything_in_it_is_filled_again(
    own_redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    async with running_mesh(mesh_file(), own_redis.url) as mesh, mesh.client() as client:
        async with AsyncPlannerClient(mesh.parts["planner-0"].admin_address) as planner:
            await planner.set_plan(await planner.get_plan())
            revision = (await planner.get_plan()).revision
            assert revision == 2
            own_redis.stop()
            await mesh.until(lambda s: not s.connected)
            assert (await client.generate("hello", temperature=0)).text
            own_redis.start()
            await mesh.until(lambda s: s.connected)
            await mesh.complete()
            await plan_is_back(mesh, own_redis)
            assert (await planner.get_plan()).revision == revision
        await mesh.until(lambda s: s.plan_revision == revision)


async def test_a_mesh_that_starts_before_its_redis_comes_up_when_redis_does(
    own_redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    own_redis.stop()
    async with TestMesh(mesh_file(), own_redis.url) as mesh:
        starting = asyncio.gather(
            mesh.start(Role.PLANNER, "planner-0"),
            mesh.start(Role.ROUTER, "router-0"),
            mesh.start(Role.WORKER, "worker-large-0", tier="large"),
        )
        done, _ = await asyncio.wait({starting}, timeout=0.5)
        assert not done
        own_redis.start()
        await starting
        await mesh.complete()
        async with mesh.client() as client:
            assert (await client.generate("hello", model="large")).tier == "large"
