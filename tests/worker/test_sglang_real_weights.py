"""A real model on a real SGLang server beside the torch engine: the same tokens, one goes on where the other ended, tools.

The model is a GGUF file in the folder that PENSTOCK_MODELS names, where there is one.
"""

import importlib.util
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.services.tool_calls.formats import HERMES
from penstock.services.tool_calls.parser import parse_reply
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.structured import StructuredOutput
from penstock.types.tools import Tool, ToolUse
from penstock.worker_service.engine.interface import Engine
from penstock.worker_service.engine.sglang.engine import SglangEngine
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_engine
from tests.support.engines import answer, started
from tests.support.gguf_folder import write_folder
from tests.support.real_models import FOLDER
from tests.support.sglang import SglangServers

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
FILE = FOLDER / "qwen2.5-coder-0.5b.gguf"
TASKS = (
    "Write a Python function that reverses a string.",
    "What is the capital of France? Answer in one word.",
    "Write a Python function `is_even(n)`. Code only.",
    "Name three primary colours.",
)
TOKENS = 32
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
WEATHER = Tool(
    "get_weather",
    "The weather of a city, now.",
    json.dumps({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not FILE.exists() or not all(map(importlib.util.find_spec, ("gguf", "accelerate"))):
        pytest.skip(f"needs {FILE.name} in PENSTOCK_MODELS, and PyPI's gguf and accelerate")
    return write_folder(FILE, tmp_path_factory.mktemp("real") / FILE.stem)


@pytest.fixture
async def server(model: Path, sglang_servers: SglangServers) -> AsyncIterator[SglangEngine]:
    shape: dict[str, Any] = {"dtype": "float32", "structured_output": True}
    async with started(await sglang_servers.engine(model, **shape)) as engine:
        yield engine


@pytest.fixture
async def ours(model: Path) -> AsyncIterator[Engine]:
    options = TorchEngineOptions(model, model.name, dtype="float32", kv_tokens=4096)
    async with started(torch_engine(options)) as engine:
        yield engine


def request(
    name: str, text: str, use: ToolUse | None = None, resumed: tuple[int, ...] = (), **more: Any
) -> GenerationRequest:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, **more})
    return GenerationRequest(name, ChatPrompt((ChatMessage("user", text),), use or ToolUse()), sampling, resumed)


async def test_both_engines_write_the_same_and_one_goes_on_where_the_other_ended(
    server: SglangEngine, ours: Engine
) -> None:
    for i, task in enumerate(TASKS):
        written = await answer(server, request(f"s{i}", task))
        own = await answer(ours, request(f"o{i}", task))
        assert own.tokens == written.tokens
        half = written.tokens[: len(written.tokens) // 2]
        for engine in (server, ours):
            rest = await answer(engine, request(f"r{i}", task, resumed=half))
            assert half + rest.tokens == written.tokens
            assert written.text.endswith(rest.text)


async def test_json_and_calls_of_tools_are_what_was_asked_for(server: SglangEngine) -> None:
    form = StructuredOutput(json_schema=json.dumps(SCHEMA))
    asked = request("j", "Give Paris and its population as JSON.", structured_output=form, max_tokens=120)
    assert json.loads((await answer(server, asked)).text).keys() == {"city", "population"}
    question, use = "What is the weather in Oslo now?", ToolUse((WEATHER,))
    text = (await answer(server, request("t", question, use, max_tokens=120))).text
    (call,) = parse_reply(text, HERMES, "t", ChatPrompt((ChatMessage("user", question),), use)).calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
