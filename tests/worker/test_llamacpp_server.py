"""llama.cpp's own server as a tier (`make test-llamacpp`): it writes what our step loop writes on the same kernels."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.llamacpp import LlamaServer, llama_server
from penstock import Options
from penstock.services.clock import SystemClock
from penstock.services.domain.errors import Unavailable
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.structured import StructuredOutput
from penstock.types.tools import Tool, ToolUse
from penstock.worker_service.engine.interface import Capability
from penstock.worker_service.engine.llamacpp.engine import LlamaCppEngineOptions, llamacpp_core
from penstock.worker_service.engine.remote.engine import RemoteEngine
from tests.support.mesh import running_mesh
from tests.support.services import RedisProcess
from tests.worker.test_remote_engine import GREEDY, QUESTION, chat, remote, reply

pytestmark = pytest.mark.slow

MODELS = ("small", "medium")


@pytest.fixture(scope="module")
async def servers(gguf_family: Callable[[str], Path]) -> AsyncIterator[dict[str, LlamaServer]]:
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(llama_server(gguf_family(name))) for name in MODELS}


@pytest.fixture
async def engine(servers: dict[str, LlamaServer]) -> AsyncIterator[RemoteEngine]:
    async with remote(f"{servers['small'].url}/v1", model="small") as created:
        yield created


async def test_text_and_logprobs_are_those_of_our_step_loop(
    engine: RemoteEngine, gguf_family: Callable[[str], Path]
) -> None:
    core, _ = llamacpp_core(LlamaCppEngineOptions(gguf_family("small"), "small", kv_tokens=4096), SystemClock())
    request = chat("a", replace(GREEDY, top_logprobs=0))
    core.add(request, core.tokenizer.encode(request.prompt))
    frames = list[TokenFrame]()
    while not core.idle:
        frames += [output for _, output in core.step() if isinstance(output, TokenFrame)]
    there = [event async for event in engine.generate(request) if isinstance(event, TokenFrame)]
    assert "".join(f.text for f in there) == "".join(f.text for f in frames) != ""
    assert Capability.LOGPROBS in engine.info.capabilities
    ours, theirs = (
        [p.chosen.logprob for f in each for p in f.logprobs if p.chosen.token_bytes] for each in (frames, there)
    )
    assert theirs == pytest.approx(ours[: len(theirs)], abs=0.05)
    assert len(theirs) >= len(ours) - 1


async def test_forms_stops_tools_and_limits_reach_it(engine: RemoteEngine) -> None:
    whole, tokens, _ = await reply(engine, chat("a"))
    text, _, finished = await reply(engine, chat("b", replace(GREEDY, stop=(whole[1:3],))))
    assert (text, finished.reason) == (whole[: whole.find(whole[1:3])], FinishReason.STOP)
    assert (await reply(engine, chat("c", replace(GREEDY, max_tokens=2))))[2].reason is FinishReason.LENGTH
    rest, _, _ = await reply(engine, chat("d", resume_token_ids=tokens[:3]))
    assert rest == whole.encode()[3:].decode()
    schema = (
        '{"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": false}'
    )
    form = StructuredOutput(json_schema=schema)
    shaped, _, _ = await reply(engine, chat("e", replace(GREEDY, structured_output=form, max_tokens=200)))
    assert isinstance(json.loads(shaped)["x"], bool)
    tools = ToolUse((Tool("double", parameters=schema),))
    offered = replace(
        chat("f", replace(GREEDY, top_logprobs=0)), prompt=ChatPrompt((ChatMessage("user", QUESTION),), tools)
    )
    assert (await reply(engine, offered))[2].usage.output_tokens > 0  # it gives no log-probabilities of such replies


async def test_two_servers_are_a_cascade(servers: dict[str, LlamaServer], redis: RedisProcess, tmp_path: Path) -> None:
    """Unchanged defaults: log-probabilities accept the small model's answer to what it has learnt."""
    tiers: list[dict[str, Any]] = [
        {"name": name, "model": name, "engine": "openai", "openai": {"endpoints": [f"{servers[name].url}/v1"]}}
        for name in MODELS
    ]
    tiers[0]["threshold"] = 60
    path = tmp_path / "mesh.yaml"
    path.write_text(json.dumps({"name": "llamacpp", "tiers": tiers, "router": {"grpc_port": 0, "http_port": 0}}))
    async with running_mesh(path, redis.url) as mesh, mesh.client() as client:
        answer = await client.generate(QUESTION, Options(temperature=0, max_tokens=40))
        assert (answer.tier, answer.tiers[0].accepted) == ("small", True)
        assert 60 <= (answer.tiers[0].score or 0) < 74
        assert answer.text.strip()


async def test_a_server_that_is_gone_is_said_so(gguf_family: Callable[[str], Path]) -> None:
    async with AsyncExitStack() as stack:
        async with llama_server(gguf_family("small")) as server:
            engine = await stack.enter_async_context(remote(f"{server.url}/v1", model="small"))
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
            await reply(engine, chat("a"))
