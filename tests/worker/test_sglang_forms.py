"""Forms of replies on a real SGLang server: in its own parameters, and kept where a reply goes on."""

import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from models.training.tokenizer import CHAT_TEMPLATE
from penstock.services.domain.errors import InvalidRequest, UnsupportedByModel
from penstock.services.tool_calls.formats import HERMES
from penstock.services.tool_calls.parser import parse_reply
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.structured import StructuredOutput
from penstock.types.tools import Tool, ToolChoice, ToolMode, ToolUse
from penstock.worker_service.engine.interface import Capability
from penstock.worker_service.engine.sglang.engine import SglangEngine
from penstock.worker_service.engine.sglang.forms import sampling_form
from tests.conftest import FAMILY
from tests.support.engines import answer, started
from tests.support.sglang import SglangServers

USER = (ChatMessage("user", "hello"),)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["a", "b"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
)
JSON_FORM = StructuredOutput(json_schema=SCHEMA)
ADD = Tool("add", "", json.dumps({"type": "object", "properties": {"unit": {"enum": ["m"]}}, "required": ["unit"]}))


def request(
    form: StructuredOutput | None, use: ToolUse | None = None, resumed: tuple[int, ...] = ()
) -> GenerationRequest:
    sampling = SamplingParams(0.0, max_tokens=300, structured_output=form)
    return GenerationRequest("r", ChatPrompt(USER, use or ToolUse()), sampling, resumed)


def test_larks_notation_is_no_form_of_the_servers() -> None:
    with pytest.raises(UnsupportedByModel, match="GBNF"):
        sampling_form(request(StructuredOutput(grammar='start: "a"')), None, enforces=True)


def test_tools_are_refused_for_a_model_that_takes_none_and_left_alone_where_nothing_is_enforced() -> None:
    with pytest.raises(UnsupportedByModel, match="takes no tools"):
        sampling_form(request(None, ToolUse((ADD,))), None, enforces=True)
    assert sampling_form(request(None, ToolUse((ADD,))), HERMES, enforces=True) == {}
    assert sampling_form(request(None, ToolUse((ADD,), ToolChoice(ToolMode.NONE))), None, enforces=True) == {}


@pytest.fixture
async def engine(sglang_servers: SglangServers, tmp_path: Path) -> AsyncIterator[SglangEngine]:
    folder = tmp_path / "tools"
    shutil.copytree(FAMILY / "small", folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("<|tool|>", "<|user|>"))
    async with started(await sglang_servers.engine(folder, kv_tokens=4096, structured_output=True)) as made:
        yield made


@pytest.mark.sglang
@pytest.mark.timeout(400)
async def test_replies_are_of_their_form_and_go_on_with_it(engine: SglangEngine) -> None:
    assert Capability.STRUCTURED_OUTPUT in engine.info.capabilities
    whole = await answer(engine, request(JSON_FORM))
    assert json.loads(whole.text)["kind"] in ("a", "b")
    half = whole.tokens[: len(whole.tokens) // 2]
    rest = await answer(engine, request(JSON_FORM, resumed=half))
    assert half + rest.tokens == whole.tokens
    assert whole.text.endswith(rest.text)
    for form, pattern in (
        (StructuredOutput(regex="[0-9]{3}"), "[0-9]{3}"),
        (StructuredOutput(choice=("yes.", "no?")), r"yes\.|no\?"),
        (StructuredOutput(grammar='root ::= "u" [0-9] [0-9]'), "u[0-9]{2}"),
    ):
        assert re.fullmatch(pattern, (await answer(engine, request(form))).text)
    for choice in (ToolChoice(ToolMode.REQUIRED, "add", parallel=False), ToolChoice(ToolMode.REQUIRED, parallel=False)):
        calls = parse_reply((await answer(engine, request(None, ToolUse((ADD,), choice)))).text, HERMES, "r").calls
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"unit": "m"})]
    with pytest.raises(InvalidRequest, match="structured_output"):
        await answer(engine, request(StructuredOutput(regex="(a")))
    assert json.loads((await answer(engine, request(JSON_FORM))).text)
