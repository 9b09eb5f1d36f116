"""What only SGLang workers have, against real servers on the CPU: `make test-sglang` installs one.

What every engine has is tested by the contract suite, on SGLang too.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.planner_service.files.profiles import read_profile
from penstock.services.domain.errors import Overloaded, Unavailable
from penstock.services.domain.instances import Role
from penstock.services.processes import free_port
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.interface import EngineUnusable
from penstock.worker_service.engine.sglang.client import SglangClient
from penstock.worker_service.engine.sglang.engine import SglangEngine
from penstock.worker_service.engine.sglang.server_link import SglangEngineOptions
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_engine
from tests.conftest import FAMILY, MeshFileMaker
from tests.support.engines import ENDLESS, QUESTIONS, answer, collect, started, until
from tests.support.mesh import running_mesh
from tests.support.services import RedisProcess
from tests.support.sglang import CPU_LAUNCH, SglangServers, cpu_shape
from tests.support.sglang_stub import Server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
SMALL = {"kv_tokens": 4096}
TIGHT = cpu_shape(FAMILY / "small", kv_tokens=400, max_running=2, max_queued=0, max_step_tokens=64)


@pytest.fixture
async def engine(sglang_servers: SglangServers) -> AsyncIterator[SglangEngine]:
    async with started(await sglang_servers.engine(FAMILY / "small", **SMALL)) as made:
        yield made


def request(name: str, text: str, sampling: SamplingParams = GREEDY, **more: Any) -> GenerationRequest:
    return GenerationRequest(name, ChatPrompt((ChatMessage("user", text),)), sampling, **more)


async def torch_replies(model: Path) -> list[str]:
    async with started(torch_engine(TorchEngineOptions(model, model.name))) as torch:
        return [(await answer(torch, request(f"t{i}", question))).text for i, question in enumerate(QUESTIONS)]


async def test_greedy_text_is_the_torch_engines(engine: SglangEngine) -> None:
    found = [(await answer(engine, request(f"s{i}", question))).text for i, question in enumerate(QUESTIONS)]
    assert found == await torch_replies(FAMILY / "small")


async def test_a_full_server_is_overloaded(sglang_servers: SglangServers) -> None:
    """Others use the server too: its own queue is full before ours is."""
    url = await sglang_servers.url(TIGHT)
    engine = SglangEngine(SglangEngineOptions(FAMILY / "small", "small", url, max_requests=64))
    await engine.start()
    tasks = [asyncio.create_task(answer(engine, request(f"r{i}", "hello", ENDLESS))) for i in range(12)]
    await until(lambda: any(task.done() for task in tasks))
    for i in range(12):
        await engine.abort(f"r{i}")
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(one, Overloaded) for one in found)
    assert not [one for one in found if isinstance(one, BaseException) and not isinstance(one, Overloaded)]
    await engine.close()


async def test_a_slow_client_holds_nobody_up_and_misses_nothing(engine: SglangEngine) -> None:
    whole = await answer(engine, request("whole", "hello", ENDLESS))
    alone = [(await answer(engine, request(f"a{i}", q))).tokens for i, q in enumerate(QUESTIONS)]
    slow = engine.generate(request("slow", "hello", ENDLESS))
    head: list[int] = []
    async for event in slow:
        if isinstance(event, TokenFrame):
            head += event.token_ids
            break
    others = await asyncio.gather(*(answer(engine, request(f"o{i}", q)) for i, q in enumerate(QUESTIONS * 3)))
    assert [got.tokens for got in others] == alone * 3
    async for event in slow:
        if isinstance(event, TokenFrame):
            head += event.token_ids
    assert tuple(head) == whole.tokens


async def test_the_load_tells_what_is_cached(engine: SglangEngine) -> None:
    await answer(engine, request("a", "Sort: " + "7, 3, " * 30))
    await until(lambda: engine.load().cached_tokens > 150)
    assert engine.load().free_kv_blocks == engine.info.kv_blocks


async def test_a_running_server_is_profiled(sglang_servers: SglangServers, tmp_path: Path) -> None:
    url = await sglang_servers.url(TIGHT)
    argv = ["profile", str(FAMILY / "small"), "--sglang", url, "--out", str(tmp_path / "p.json"), "--json"]
    done = await asyncio.to_thread(CliRunner().invoke, app, argv)
    assert done.exit_code == 0, done.output
    found = read_profile(tmp_path / "p.json")
    assert found.engine == "sglang"
    assert (found.replica.limits.max_running, found.replica.limits.max_step_tokens) == (2, 64)
    loads = [load for load, _ in found.samples]
    assert {1, 2} <= {load.tokens for load in loads if load.pairs == 0}
    assert max(load.tokens for load in loads) == 64
    assert any(load.longest_gap > 0 for load in loads)
    assert all(0 < seconds < 5 for _, seconds in found.samples)


async def test_a_server_that_is_not_there_is_waited_for_and_then_named() -> None:
    gone = SglangEngine(
        SglangEngineOptions(FAMILY / "medium", "m", f"http://127.0.0.1:{free_port()}", start_timeout_s=0.1)
    )
    with pytest.raises(EngineUnusable, match="no SGLang server"):
        await gone.start()


async def test_a_running_server_that_dies_fails_the_engine(sglang_servers: SglangServers) -> None:
    url = await sglang_servers.url(TIGHT)
    engine = SglangEngine(SglangEngineOptions(FAMILY / "small", "small", url, gone_s=0.5))
    await engine.start()
    running = asyncio.create_task(collect(engine.generate(request("a", "hello", ENDLESS))))
    await until(lambda: bool(engine.load().running_tokens))
    sglang_servers.kill(TIGHT)
    with pytest.raises(Unavailable):
        await running
    assert isinstance(await engine.failed(), Unavailable)
    await engine.close()


def server_pid(port: int) -> int:
    """The SGLang server that was told to listen there."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        argv = path.read_bytes().split(b"\0") if path.exists() else []
        if b"sglang.launch_server" in argv and b"%d" % port in argv:
            return int(path.parent.name)
    raise AssertionError(f"no server at {port}")


async def test_a_killed_server_loses_no_reply_and_comes_back(
    sglang_servers: SglangServers, redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    """One tier, one model. A worker's own server is killed under load: replies go on at the other SGLang server, the
    worker is out until its server runs again. Killed again, with a torch worker beside it: they go on there."""
    model, port = FAMILY / "small", free_port()
    other = await sglang_servers.url(cpu_shape(model, **SMALL))
    tier = {"name": "only", "model": str(model), "engine": "sglang", "kv_tokens": 4096, "workers": 1}
    file = mesh_file([tier | {"sglang": CPU_LAUNCH | {"port": port, "flags": list(CPU_LAUNCH["flags"])}}])
    wanted = await torch_replies(model) * 8

    async def ask_all(client: Any) -> list[str]:
        replies = await asyncio.gather(*(client.generate(q, temperature=0, max_tokens=60) for q in QUESTIONS * 8))
        return [reply.text for reply in replies]

    def state(status: Any, name: str) -> str:
        return next((i.state for i in status.instances if i.instance_id == name), "gone")

    async with running_mesh(file, redis.url) as mesh, mesh.client() as client:
        content = yaml.safe_load(file.read_text())
        content["tiers"][0]["sglang"] = {"endpoint": other}
        file.write_text(yaml.safe_dump(content))
        await mesh.start(Role.WORKER, "worker-other", tier="only")
        await mesh.complete()
        load = asyncio.create_task(ask_all(client))
        await mesh.until(lambda s: any(i.instance_id == "worker-only-0" and i.running for i in s.instances))
        os.kill(server_pid(port), signal.SIGKILL)
        assert await load == wanted
        await mesh.until(lambda s: state(s, "worker-only-0") == "draining")
        assert await ask_all(client) == wanted  # the other alone
        await mesh.until(lambda s: state(s, "worker-only-0") == "ready", timeout_s=150)
        await mesh.stop("worker-other")
        assert await ask_all(client) == wanted  # the one that came back alone
        del content["tiers"][0]["sglang"]
        content["tiers"][0]["engine"] = "torch"
        file.write_text(yaml.safe_dump(content))
        await mesh.start(Role.WORKER, "worker-torch", tier="only")
        await mesh.complete()
        load = asyncio.create_task(ask_all(client))
        await mesh.until(lambda s: any(i.instance_id == "worker-only-0" and i.running for i in s.instances))
        os.kill(server_pid(port), signal.SIGKILL)
        assert await load == wanted


class OpenServer(Server):
    """Its streams do not end behind their last token."""

    async def generate(self, asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(asked)
        await self.write(response, [5], None)
        await self.write(response, [5, 6], {"type": "length"})
        await asyncio.Event().wait()
        return response


async def test_a_reply_is_whole_though_its_stream_does_not_end() -> None:
    async with OpenServer().serving() as url:
        client = SglangClient(url)
        pieces = [piece async for piece in client.generate("late", [1, 2], {})]
        await client.close()
    assert [piece.token_ids for piece in pieces] == [[5], [6]]
    assert [piece.finish for piece in pieces] == [None, "length"]
