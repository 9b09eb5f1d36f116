"""The SGLang engine against a real server on the CPU: `make test-sglang` installs it; skipped where it is not there."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from services.domain import (
    ChatMessage,
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    PromptTooLong,
    Role,
    SamplingParams,
    TokenFrame,
    Unavailable,
)
from services.processes import free_port
from services.testing import RedisProcess
from tests.conftest import FAMILY, MeshFileMaker
from tests.support.mesh import running_mesh
from tests.support.sglang import sglang_server
from tests.worker.test_engine_contract import QUESTIONS, answer, collect
from worker_service.engine.interface import EngineUnusable
from worker_service.engine.sglang import SglangEngine, SglangEngineOptions
from worker_service.engine.torch import TorchEngineOptions, torch_engine

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(400),
]
GREEDY = SamplingParams(temperature=0.0, max_output_tokens=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with sglang_server(FAMILY / "medium", free_port(), log) as url:
        yield url


@pytest.fixture
async def engine(server: str) -> AsyncIterator[SglangEngine]:
    made = SglangEngine(SglangEngineOptions(FAMILY / "medium", "medium", server, start_timeout_s=60))
    await made.start()
    yield made
    await made.close()


def request(name: str, text: str, sampling: SamplingParams = GREEDY, **more: Any) -> GenerationRequest:
    return GenerationRequest(name, ChatPrompt((ChatMessage("user", text),)), sampling, **more)


async def test_greedy_text_is_the_torch_engines(engine: SglangEngine) -> None:
    torch = torch_engine(TorchEngineOptions(FAMILY / "medium", "medium"))
    await torch.start()
    for i, question in enumerate(QUESTIONS):
        ours, theirs = (
            await answer(torch, request(f"t{i}", question)),
            await collect(engine.generate(request(f"s{i}", question))),
        )
        assert theirs.tokens == ours.tokens
        assert theirs.text == ours.text
        assert theirs.finished is not None
        assert ours.finished is not None
        assert theirs.finished.reason is ours.finished.reason
    await torch.close()


async def test_stop_strings_logprobs_length_and_resuming(engine: SglangEngine) -> None:
    whole = await collect(engine.generate(request("a", QUESTIONS[3])))
    stop = whole.text[5:8]
    stopped = await collect(engine.generate(request("b", QUESTIONS[3], replace(GREEDY, stop=(stop,)))))
    assert stopped.text == whole.text[: whole.text.find(stop)]
    assert stopped.finished is not None
    assert stopped.finished.stop == stop
    told = await collect(engine.generate(request("c", QUESTIONS[3], replace(GREEDY, top_logprobs=2))))
    assert [p.chosen.token_id for p in told.logprobs] == list(told.tokens)
    assert all(len(p.top) == 2 for p in told.logprobs)
    short = await collect(engine.generate(request("d", QUESTIONS[3], replace(GREEDY, max_output_tokens=3))))
    assert short.finished is not None
    assert short.finished.reason is FinishReason.LENGTH
    assert len(short.tokens) == 3
    cut = whole.tokens[:4]
    rest = await collect(engine.generate(request("e", QUESTIONS[3], resume_token_ids=cut)), len(cut))
    assert cut + rest.tokens == whole.tokens
    done = await collect(engine.generate(request("f", QUESTIONS[3], resume_token_ids=whole.tokens)), len(whole.tokens))
    assert done.tokens == ()
    with pytest.raises(PromptTooLong):
        await collect(engine.generate(request("g", "x" * 5000)))


async def test_abort_and_leaving_free_the_server(engine: SglangEngine) -> None:
    endless = SamplingParams(temperature=0.0, max_output_tokens=1500, ignore_eos=True)
    running = asyncio.create_task(collect(engine.generate(request("a", "hello", endless))))
    while not engine.load().running_tokens:
        await asyncio.sleep(0.01)
    assert await engine.abort("a")
    got = await running
    assert got.finished is not None
    assert got.finished.reason is FinishReason.ABORTED
    events = engine.generate(request("b", "hello", endless))
    async for event in events:
        if isinstance(event, TokenFrame):
            break
    await events.aclose()
    assert engine.load().requests == 0
    assert not await engine.abort("b")


async def test_a_server_that_is_not_there_is_waited_for_and_then_named() -> None:
    gone = SglangEngine(
        SglangEngineOptions(FAMILY / "medium", "m", f"http://127.0.0.1:{free_port()}", start_timeout_s=0.1)
    )
    with pytest.raises(EngineUnusable, match="no SGLang server"):
        await gone.start()


async def test_a_mesh_serves_on_sglang_and_fails_over_to_torch(
    server: str, redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    """One tier, one model, two engines: when the SGLang worker goes, its replies go on at the torch worker."""
    model = str(FAMILY / "medium")
    file = mesh_file([{"name": "only", "model": model, "engine": "sglang", "sglang": {"endpoint": server}}])
    async with running_mesh(file, redis.url) as mesh, mesh.client() as client:
        wanted = [(await client.generate(q, temperature=0, max_tokens=60)).text for q in QUESTIONS]
        file.write_text(file.read_text().replace("engine: sglang", "engine: torch"))
        await mesh.start(Role.WORKER, "worker-torch", tier="only")
        await mesh.complete()
        running = [asyncio.create_task(client.generate(q, temperature=0, max_tokens=60)) for q in QUESTIONS]
        found = [(await task).text for task in running]
        assert found == wanted
        engines = {i.engine for i in (await client.status()).instances if i.role == "worker"}
        assert engines == {"sglang", "torch"}


async def test_a_server_that_dies_fails_the_engine(tmp_path: Any) -> None:
    with sglang_server(FAMILY / "small", free_port(), tmp_path / "log") as url:
        engine = SglangEngine(SglangEngineOptions(FAMILY / "small", "small", url, gone_s=0.5))
        await engine.start()
        endless = SamplingParams(temperature=0.0, max_output_tokens=1500, ignore_eos=True)
        running = asyncio.create_task(collect(engine.generate(request("a", "hello", endless))))
        while not engine.load().running_tokens:
            await asyncio.sleep(0.01)
    with pytest.raises(Unavailable):
        await running
    assert isinstance(await engine.failed(), Unavailable)
    await engine.close()
