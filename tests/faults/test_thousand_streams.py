"""1,000 streams at once, under the settings as they come, through two routers of which one is killed."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.fault_streams import StreamResult, grpc_stream, process_of, signal_process, until_whole
from penstock import AsyncClient
from penstock.local.mesh import LocalMesh
from penstock.placement.mesh_input import MeshOptions
from tests.conftest import write_mesh_file
from tests.support.simulated_text import ENDLESS, simulated_texts

pytestmark = pytest.mark.slow

STREAMS = 1000
TOKENS = 12
PACE = {"overhead_ms": 120.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
TIMEOUT_S = 400.0


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[LocalMesh]:
    """Two routers and two workers of one tier, as processes. Only the workers' room is set: the routers' is the usual one."""
    room = {"max_running": 300, "max_queued": 300, "kv_tokens": 100_000}
    tier = {"name": "only", "model": "sim", "workers": 2, "simulated": PACE, **room}
    file = write_mesh_file(tmp_path, [tier], router={"replicas": 2, "grpc_port": 0, "http_port": 0})
    async with LocalMesh(MeshOptions(file, tmp_path, log_level="warning")) as running:
        yield running


async def test_a_killed_router_costs_a_thousand_streams_nothing(mesh: LocalMesh) -> None:
    """The other one serves them all, to the text that the engine alone computes."""
    await until_whole(mesh)
    texts = simulated_texts({f"question {i}": TOKENS for i in range(STREAMS)})
    results = [StreamResult(prompt) for prompt in texts]
    first = mesh.addresses.grpc[0]
    victim = process_of(mesh, next(r.instance_id for r in mesh.view.instances() if r.address == first))
    async with AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin, timeout_s=TIMEOUT_S) as client:
        stream = grpc_stream(client, model="only", max_tokens=TOKENS)
        running = [asyncio.create_task(stream(r.prompt, r)) for r in results]
        while sum(1 for r in results if r.tokens) < 100:
            await asyncio.sleep(0.01)
        signal_process(mesh, victim, signal.SIGKILL)
        await asyncio.gather(*running)
    assert [r.error for r in results if r.error] == [], "lost"
    assert not any(r.doubled for r in results), "a token twice, or one missing"
    assert {r.prompt: r.text for r in results} == texts
