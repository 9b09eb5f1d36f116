"""A request that kills what works on it: real processes, which die of its prompt, under streams of others."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from benchmarks.fault_streams import StreamResult, grpc_stream
from penstock import AsyncClient, MeshStatus
from penstock.client.errors import PenstockError
from penstock.services.domain.instances import Role
from tests.conftest import write_mesh_file
from tests.support.mesh import TestMesh
from tests.support.mortal_processes import Mortals, mortals
from tests.support.services import RedisProcess

pytestmark = pytest.mark.slow

POISON = "the poison"
WORKERS = [f"worker-{i}" for i in range(4)]
BYSTANDERS, TOKENS = 12, 400
SLOW = {"overhead_ms": 10.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": 1_000_000}


@pytest.fixture
async def mesh(tmp_path: Path, redis: RedisProcess) -> AsyncIterator[tuple[TestMesh, Mortals]]:
    file = write_mesh_file(tmp_path, [{"name": "only", "model": "sim", "simulated": SLOW, "max_running": 64}])
    async with TestMesh(file, redis.url) as made:
        await made.start(Role.PLANNER, "planner-0")
        await made.start(Role.ROUTER, "router-0")
        await made.start(Role.ROUTER, "router-1")
        async with mortals(dict.fromkeys(WORKERS, f"prompt:{POISON}"), file, redis.url) as workers:
            await made.until(lambda s: set(WORKERS) <= {i.instance_id for i in s.instances} and s.plan_revision > 0)
            yield made, workers


async def until_killed(workers: Mortals, count: int) -> None:
    async with asyncio.timeout(120):
        while len(workers.killed) < count:
            await asyncio.sleep(0.01)


async def test_a_query_of_death_kills_two_instances_and_no_more(mesh: tuple[TestMesh, Mortals]) -> None:
    """By gRPC with an SDK that knows two routers and retries, and by HTTP: a clear error, and no third instance is tried.

    Replies that ran on the instances that died go on at the others, to their ends.
    """
    made, workers = mesh
    parts = [made.parts[name] for name in ("router-0", "router-1")]
    routers = [part.address for part in parts]
    async with AsyncClient(routers, timeout_s=60) as client:
        bystanders = [StreamResult(f"bystander {i}") for i in range(BYSTANDERS)]
        stream = grpc_stream(client, max_tokens=TOKENS)
        tasks = [asyncio.create_task(stream(b.prompt, b)) for b in bystanders]
        while not all(b.tokens > 50 for b in bystanders):
            await asyncio.sleep(0.01)
        with pytest.raises(PenstockError) as caught:
            await client.generate(f"drink {POISON}", max_tokens=8)
        assert caught.value.reason == "POISON_REQUEST"
        await until_killed(workers, 2)
        await asyncio.gather(*tasks)
        assert [(b.tokens, b.doubled, b.error) for b in bystanders] == [(TOKENS, False, "")] * BYSTANDERS
        assert len(workers.killed) == 2
        statuses = [await one_status(part.admin_address) for part in parts]
        assert sum(status.failed for status in statuses) == 1, "one router met it, and the SDK did not try the other"

        body = {"model": "only", "messages": [{"role": "user", "content": POISON}], "max_tokens": 8}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{made.http}/v1/chat/completions", json=body) as response,
        ):
            assert response.status == 422
            error = (await response.json())["error"]
            assert (error["code"], error["type"]) == ("poison_request", "invalid_request_error")
        await until_killed(workers, 4)


async def one_status(admin: str) -> MeshStatus:
    async with AsyncClient(admin, admin=admin) as client:
        return await client.status()
