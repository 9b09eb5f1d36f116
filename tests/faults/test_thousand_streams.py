"""1,000 streams at once, under the settings as they come: through one router, and through two of which one is killed."""

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml

from benchmarks.fault_streams import StreamResult, grpc_stream, process_of, signal_process, until_whole
from penstock import AsyncClient
from penstock.local import LocalMesh, MeshOptions
from services.clock import VirtualClock
from services.domain import ChatMessage, ChatPrompt, GenerationRequest, SamplingParams, StepLatencyModel, TokenFrame
from worker_service.engine.simulated import SimulatedEngineOptions, simulated_core

STREAMS = 1000
TOKENS = 12
PACE = {"overhead_ms": 120.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 1_000_000}
TIMEOUT_S = 150.0


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalMesh]:
    """Two routers and two workers of one tier, as processes. Only the workers' room is set: the routers' is the usual one."""
    folder = tmp_path_factory.mktemp("thousand")
    room = {"max_running": 300, "max_queued": 300, "kv_tokens": 100_000}
    content: dict[str, Any] = {
        "name": "test-thousand",
        "tiers": [{"name": "only", "model": "sim", "engine": "simulated", "workers": 2, "simulated": PACE, **room}],
        "judge": {"scorers": [{"name": "confidence", "kind": "confidence"}], "default_scorer": "confidence"},
        "router": {"replicas": 2, "grpc_port": 0, "http_port": 0},
    }
    file = folder / "mesh.yaml"
    file.write_text(yaml.safe_dump(content))
    async with LocalMesh(MeshOptions(file, folder, log_level="warning")) as running:
        yield running


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Every prompt's text as the engine alone computes it, without a mesh or time."""
    latency = StepLatencyModel.linear(0.0, 0.0, 0.0)
    options = SimulatedEngineOptions("sim", latency, int(PACE["reply_tokens"]), kv_tokens=100_000, max_queued=STREAMS)
    core, _ = simulated_core(options, VirtualClock())
    texts = {f"question {i}": "" for i in range(STREAMS)}
    for prompt in texts:
        sampling, chat = (
            SamplingParams(temperature=0.0, max_output_tokens=TOKENS),
            ChatPrompt((ChatMessage("user", prompt),)),
        )
        core.add(GenerationRequest(prompt, chat, sampling), core.tokenizer.encode(chat))
    while not core.idle:
        for prompt, output in core.step():
            if isinstance(output, TokenFrame):
                texts[prompt] += output.text
    return texts


def check(results: list[StreamResult], texts: dict[str, str]) -> None:
    assert [r.error for r in results if r.error] == [], "lost"
    assert not any(r.doubled for r in results), "a token twice, or one missing"
    assert {r.prompt: r.text for r in results} == texts


@pytest.mark.timeout(300)
async def test_one_router_serves_a_thousand_streams_at_once(mesh: LocalMesh, texts: dict[str, str]) -> None:
    await until_whole(mesh)
    results = [StreamResult(prompt) for prompt in texts]
    async with AsyncClient(mesh.grpc_addresses[0], admin=mesh.admin_addresses[0], timeout_s=TIMEOUT_S) as client:
        stream = grpc_stream(client, model="only", max_tokens=TOKENS)
        await asyncio.gather(*(stream(r.prompt, r) for r in results))
        status = await client.status()
    check(results, texts)
    assert status.failed == 0


@pytest.mark.timeout(300)
async def test_a_killed_router_costs_a_thousand_streams_nothing(mesh: LocalMesh, texts: dict[str, str]) -> None:
    await until_whole(mesh)
    results = [StreamResult(prompt) for prompt in texts]
    first = mesh.grpc_addresses[0]
    victim = process_of(mesh, next(r.instance_id for r in mesh.view.instances() if r.address == first))
    async with AsyncClient(mesh.grpc_addresses, admin=mesh.admin_addresses, timeout_s=TIMEOUT_S) as client:
        stream = grpc_stream(client, model="only", max_tokens=TOKENS)
        running = [asyncio.create_task(stream(r.prompt, r)) for r in results]
        while sum(1 for r in results if r.tokens) < 100:
            await asyncio.sleep(0.01)
        signal_process(mesh, victim, signal.SIGKILL)
        await asyncio.gather(*running)
    check(results, texts)
