"""The Redis of a mesh dies or hangs under 300 streams, and Sentinels make its replica the Redis. Real processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from benchmarks.fault_streams import StreamResult, grpc_stream, until_whole
from penstock import AsyncClient, AsyncPlannerClient
from penstock.local.mesh import LocalMesh
from penstock.placement.mesh_input import MeshOptions
from penstock.services.state.connection import connect
from penstock.services.state.keys import Keys
from penstock.services.state.plans import PlanStore
from tests.conftest import write_mesh_file
from tests.support.sentinels import SentinelRedis, sentinel_redis
from tests.support.simulated_text import ENDLESS, simulated_texts

pytestmark = pytest.mark.slow

STREAMS = 300
TOKENS = 40  # ten seconds
PACE = {"overhead_ms": 250.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
TIMEOUT_S = 400.0


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelRedis]:
    with sentinel_redis(tmp_path_factory.mktemp("sentinels")) as made:
        yield made


@pytest.fixture(scope="module")
async def mesh(state: SentinelRedis, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalMesh]:
    """Two routers and two workers of one tier, whose Redis Sentinels name."""
    folder = tmp_path_factory.mktemp("failover")
    room = {"max_running": 300, "max_queued": 300, "kv_tokens": 100_000}
    tier = {"name": "only", "model": "sim", "workers": 2, "simulated": PACE, **room}
    router = {"replicas": 2, "grpc_port": 0, "http_port": 0}
    file = write_mesh_file(folder, [tier], router=router, redis_url=state.url)
    async with LocalMesh(MeshOptions(file, folder, log_level="warning")) as running:
        yield running


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Every prompt's text as the engine alone computes it."""
    return simulated_texts({f"question {i}": TOKENS for i in range(STREAMS)})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=lambda fault: fault.name)
async def test_a_failover_of_redis_costs_300_streams_nothing(
    state: SentinelRedis, mesh: LocalMesh, texts: dict[str, str], fault: signal.Signals
) -> None:
    """As many are under way all the time. Afterwards the mesh is whole with the same plan, and publishes the next one, in the
    new Redis."""
    await asyncio.to_thread(state.until_replicated)
    await until_whole(mesh)
    failed, results, over = state.primary(), list[StreamResult](), asyncio.Event()

    async def ask(prompt: str) -> None:
        while not over.is_set():
            results.append(result := StreamResult(prompt))
            await stream(prompt, result)

    async with AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin, timeout_s=TIMEOUT_S) as client:
        before = await client.status()
        stream = grpc_stream(client, model="only", max_tokens=TOKENS)
        running = [asyncio.create_task(ask(prompt)) for prompt in texts]
        while len({r.prompt for r in results if r.tokens}) < STREAMS:
            await asyncio.sleep(0.01)
        os.kill(failed.pid, fault)
        while (promoted := await asyncio.to_thread(state.primary)) is failed:
            await asyncio.sleep(0.05)
        await until_whole(mesh)
        over.set()
        await asyncio.gather(*running)
        after = await client.status()
    assert [r.error for r in results if r.error] == [], "lost"
    assert not any(r.doubled for r in results), "a token twice, or one missing"
    assert all(r.text == texts[r.prompt] for r in results)
    assert (after.failed, after.failovers) == (before.failed, before.failovers)
    assert after.plan_revision == before.plan_revision
    async with AsyncPlannerClient(mesh.addresses.planner) as planner:
        published = await planner.set_plan(await planner.get_plan())
    direct = connect(promoted.url)
    try:
        assert await PlanStore(direct, Keys(mesh.mesh.name)).get(published.revision) == published
    finally:
        await direct.aclose()
    if fault is signal.SIGKILL:
        failed.stop()
        failed.start()  # the Sentinels make it the replica
    else:
        os.kill(failed.pid, signal.SIGCONT)
    await asyncio.to_thread(state.until_replicated)
    assert state.primary() is promoted
    await until_whole(mesh)
