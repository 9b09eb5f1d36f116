"""Tools and structured output over HTTP, asked for by the official client. The simulated engine writes letters; grammars make
calls and forms of them."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from grpc import aio
from typer.testing import CliRunner, Result

from penstock import Escalated, Finished, InvalidRequestError, StructuredOutput, Tokens, Tool
from penstock.cli.main import app
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from tests.conftest import FAMILY, MeshRunner
from tests.support.mesh import TestMesh
from tests.support.present import present

NO_TOOLS = (  # a chat template
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FAST = {"overhead_ms": 0.5, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 12}
FORMS: list[dict[str, Any]] = [
    {"name": "small", "model": "sim-s", "threshold": 50, "simulated": FAST},
    {"name": "large", "model": "sim-l", "simulated": FAST},
]
MESH = {"tiers": FORMS}
HELLO: Any = [{"role": "user", "content": "hello"}]
ARGUMENTS = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "unit": {"enum": ["m", "ft"]}},
    "required": ["x", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "convert", "description": "Converts.", "parameters": ARGUMENTS}},
    {"type": "function", "function": {"name": "clock"}},
]


async def test_a_required_call_names_a_tool_and_fits_its_schema(client: openai.AsyncOpenAI) -> None:
    for text in ("a", "b", "c"):
        reply = await client.chat.completions.create(
            model="cascade", messages=[{"role": "user", "content": text}], tools=TOOLS, tool_choice="required"
        )
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            assert call.type == "function"
            assert call.function.name in ("convert", "clock")
            arguments = json.loads(call.function.arguments)
            if call.function.name == "convert":
                assert isinstance(arguments["x"], int)
                assert arguments["unit"] in ("m", "ft")


async def test_the_named_tool_is_called_once(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model="large", messages=HELLO, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "convert"}}
    )
    (call,) = present(reply.choices[0].message.tool_calls)
    assert call.type == "function"
    assert call.function.name == "convert"
    assert set(json.loads(call.function.arguments)) == {"x", "unit"}


async def test_streamed_calls_join_to_the_whole_ones(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "large", "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    whole = (await client.chat.completions.create(**asked)).choices[0].message.tool_calls or []
    pieces: dict[int, list[Any]] = {}
    finish, content = None, ""
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            content += choice.delta.content or ""
            for delta in choice.delta.tool_calls or ():
                pieces.setdefault(delta.index, []).append(delta)
    assert finish == "tool_calls"
    assert content == ""
    assert len(pieces) == len(whole)
    for (_, deltas), call in zip(sorted(pieces.items()), whole, strict=True):
        assert call.type == "function"
        assert deltas[0].id
        assert [d.function.name for d in deltas if d.function.name] == [call.function.name]
        assert "".join(d.function.arguments or "" for d in deltas) == call.function.arguments
        assert len(deltas) > 2, "arguments come while they are written"


async def test_tools_that_need_not_be_called_leave_the_text_alone(client: openai.AsyncOpenAI) -> None:
    """`none` and an empty list change nothing; with `auto` the simulated engine answers in letters."""
    plain = await client.chat.completions.create(model="large", messages=HELLO, temperature=0)
    unasked: Any = ({"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {"tools": [], "tool_choice": "none"})
    for extra in unasked:
        reply = await client.chat.completions.create(model="large", messages=HELLO, temperature=0, **extra)
        assert reply.choices[0].message.content == plain.choices[0].message.content
        assert reply.choices[0].message.tool_calls is None
        assert reply.usage.prompt_tokens == plain.usage.prompt_tokens  # type: ignore[union-attr]
    offered = await client.chat.completions.create(model="large", messages=HELLO, tools=TOOLS)
    assert offered.choices[0].message.content
    assert offered.choices[0].finish_reason == "stop"
    assert offered.usage.prompt_tokens > plain.usage.prompt_tokens  # type: ignore[union-attr]


async def test_a_conversation_with_tools_goes_on_with_messages_as_they_came(client: openai.AsyncOpenAI) -> None:
    """What the client got may be sent back as it is, with what other providers add to it."""
    first = await client.chat.completions.create(model="large", messages=HELLO, tools=TOOLS, tool_choice="required")
    message = first.choices[0].message
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls or ()]
    echoed = message.model_dump() | {"annotations": [], "provider_specific_fields": {"a": 1}, "reasoning_content": "hm"}
    for sent in (message, echoed):
        turns: Any = [*HELLO, sent, *results]
        reply = await client.chat.completions.create(model="large", messages=turns, tools=TOOLS)
        assert reply.choices[0].message.content
    plain = await client.chat.completions.create(model="large", messages=HELLO)
    said: Any = plain.choices[0].message.model_dump()
    again = await client.chat.completions.create(model="large", messages=[*HELLO, said, *HELLO])
    assert again.choices[0].message.content


async def test_null_and_default_values_change_nothing(client: openai.AsyncOpenAI) -> None:
    plain = await client.chat.completions.create(model="large", messages=HELLO, temperature=0)
    harmless: dict[str, Any] = {
        "tools": None, "tool_choice": None, "parallel_tool_calls": True, "functions": None, "function_call": "auto",
        "response_format": None, "modalities": ["text"], "audio": None, "prediction": None, "reasoning_effort": None,
        "verbosity": None, "web_search_options": None, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0, "ignore_eos": False, "stop": None, "seed": None, "n": 1,
        "structured_outputs": None, "guided_json": None, "stream_options": None, "logprobs": False, "user": None,
    }  # fmt: skip
    reply = await client.chat.completions.create(model="large", messages=HELLO, temperature=0, extra_body=harmless)
    assert reply.choices[0].message.content == plain.choices[0].message.content
    for strict in ({"top_k": -2}, {"reasoning_effort": "high"}, {"repetition_penalty": 2.1}, {"modalities": ["audio"]}):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="large", messages=HELLO, extra_body=strict)
        assert next(iter(strict)) in str(refused.value)


class Person(pydantic.BaseModel):
    name: str
    age: int
    title: Literal["Dr", "Mr", "Ms"]


async def test_parse_gives_an_object_of_the_clients_class(client: openai.AsyncOpenAI) -> None:
    for model in ("cascade", "large"):
        reply = await client.chat.completions.parse(model=model, messages=HELLO, response_format=Person)
        assert isinstance(reply.choices[0].message.parsed, Person)


async def test_parse_gives_the_arguments_of_strict_tools(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.parse(
        model="large", messages=HELLO, tools=[openai.pydantic_function_tool(Person)], tool_choice="required"
    )
    for call in reply.choices[0].message.tool_calls or ():
        assert isinstance(call.function.parsed_arguments, Person)


@pytest.mark.parametrize(
    ("extra", "texts"),
    [
        ({"regex": "ab{2}/x"}, ["abb/x"]),
        ({"guided_regex": "[q]{3}"}, ["qqq"]),
        ({"structured_outputs": {"regex": "z\nz"}}, ["z\nz"]),
        ({"guided_choice": ["yes", 'n"o']}, ["yes", 'n"o']),
        ({"structured_outputs": {"choice": ["left", "right"]}}, ["left", "right"]),
        ({"ebnf": 'root ::= "up" | "down"'}, ["up", "down"]),
        ({"guided_grammar": 'start: "a" b\nb: "c" | "d"'}, ["ac", "ad"]),
        ({"structured_outputs": {"grammar": 'start: "g"'}}, ["g"]),
        ({"guided_json": {"enum": [7]}}, ["7"]),
        ({"structured_outputs": {"json": '{"const": null}'}}, ["null"]),
    ],
)
async def test_forms_in_the_names_of_vllm_and_sglang(
    client: openai.AsyncOpenAI, extra: dict[str, Any], texts: list[str]
) -> None:
    chat = await client.chat.completions.create(model="cascade", messages=HELLO, extra_body=extra)
    assert chat.choices[0].message.content in texts
    completion = await client.completions.create(model="large", prompt="x", extra_body=extra, max_tokens=100)
    assert completion.choices[0].text in texts


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"regex": "(a"}, "regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"ebnf": "root ::= nowhere"}, "ebnf"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#"}}}},
            "response_format.json_schema.schema",
        ),
        ({"tools": [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
          "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
async def test_what_cannot_be_enforced_is_refused_by_the_clients_own_field(
    client: openai.AsyncOpenAI, extra: dict[str, Any], field: str
) -> None:
    for model in ("cascade", "large"):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=model, messages=HELLO, extra_body=extra)
        assert refused.value.body["param"] == field  # type: ignore[index]


async def test_a_reply_cut_off_is_escalated_as_worthless(client: openai.AsyncOpenAI) -> None:
    """The small tier's confidence would stand; half an object is worth nothing."""
    reply = await client.chat.completions.create(
        model="cascade", messages=HELLO, response_format={"type": "json_object"}, max_tokens=1
    )
    first = (reply.model_extra or {})["penstock"]["tiers"][0]
    assert (first["score"], first["accepted"]) == (0, False)
    calls = await client.chat.completions.create(
        model="cascade", messages=HELLO, tools=TOOLS, tool_choice="required", max_tokens=3
    )
    assert [t["accepted"] for t in (calls.model_extra or {})["penstock"]["tiers"]] == [False, True]
    assert calls.choices[0].finish_reason == "length"


async def test_the_sdk_calls_tools_and_asks_for_forms(mesh: TestMesh) -> None:
    tools = [Tool("convert", "Converts.", ARGUMENTS), Tool("clock")]
    async with mesh.client() as client:
        reply = await client.generate("hello", tools=tools, tool_choice="convert")
        (call,) = reply.tool_calls
        assert call.name == "convert"
        assert set(json.loads(call.arguments)) == {"x", "unit"}
        assert reply.content == ""
        assert call.arguments in reply.text
        turns = [{"role": "user", "content": "hello"}, reply.message]
        turns.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        assert (await client.generate(turns, tools=tools)).content
        formed = await client.generate("hello", structured_output=StructuredOutput(json_schema={"enum": ["a"]}))
        assert (formed.content, formed.tool_calls) == ('"a"', ())
        events = [event async for event in client.stream("hello", tools=tools, tool_choice="required", model="large")]
        assert "<tool_call>" in "".join(event.text for event in events if isinstance(event, Tokens))
        with pytest.raises(ValueError, match="exactly one"):
            await client.generate("hello", structured_output=StructuredOutput(regex="a", json_object=True))
        with pytest.raises(ValueError, match="without tools"):
            await client.generate("hello", tool_choice="required")


async def test_a_resumed_reply_still_tells_its_calls(mesh: TestMesh) -> None:
    """A client that goes on behind a broken stream hands in the text so far; the calls are read from the whole."""
    message = pb.GenerateRequest(model="large")
    message.prompt.chat.messages.add(role="user", content="hello")
    message.prompt.chat.tool_use.tools.add(name="clock")
    message.prompt.chat.tool_use.choice.mode = common_pb2.TOOL_MODE_REQUIRED
    message.sampling.temperature = 0.0
    async with aio.insecure_channel(mesh.router.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        whole = [event async for event in stub.Generate(message)]
        tokens = [t for event in whole if event.HasField("tokens") for t in event.tokens.frame.token_ids]
        text = "".join(event.tokens.frame.text for event in whole if event.HasField("tokens"))
        half = len(tokens) // 2
        message.resume.CopyFrom(pb.Resume(tier="large", token_ids=tokens[:half], text=text[:half]))  # a byte is a token
        rest = [event async for event in stub.Generate(message)]
    assert whole[-1].finished.tool_calls[0].name == "clock"
    assert [(c.name, c.arguments) for c in rest[-1].finished.tool_calls] == [
        (c.name, c.arguments) for c in whole[-1].finished.tool_calls
    ]
    assert text[half:] == "".join(event.tokens.frame.text for event in rest if event.HasField("tokens"))


async def test_the_cli_asks_for_forms_and_shows_calls(mesh: TestMesh, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    (tmp_path / "schema.json").write_text('{"enum": ["a", "b"]}')
    (tmp_path / "grammar").write_text('root ::= "up" | "down"')

    async def ask(*options: str) -> Result:
        arguments = ["ask", "hello", "-t", mesh.router.address, *options]
        return await asyncio.to_thread(lambda: CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments))

    for options, texts in (
        (("--regex", "x[yz]"), ["xy", "xz"]),
        (("--choice", "left", "--choice", "right"), ["left", "right"]),
        (("--json-schema", str(tmp_path / "schema.json")), ['"a"', '"b"']),
        (("--grammar", str(tmp_path / "grammar")), ["up", "down"]),
    ):
        done = await ask("-q", *options)
        assert (done.exit_code, done.stdout.strip() in texts) == (0, True), done.output
    assert json.loads((await ask("-q", "--json-object")).stdout) is not None
    called = await ask("--tools", str(tmp_path / "tools.json"), "--tool-choice", "convert")
    assert "calls convert({" in called.output
    for options, message in (
        (("--regex", "a", "--choice", "b"), "--choice: cannot be combined with --regex"),
        (("--tool-choice", "required"), "--tool-choice: needs --tools"),
        (("--json-schema", str(tmp_path / "grammar")), "is not JSON"),
        (("--tools", str(tmp_path / "schema.json")), "must hold a JSON list"),
        (("--json-schema", str(tmp_path / "nowhere")), "does not exist"),
    ):
        refused = await ask(*options)
        assert refused.exit_code == 2
        assert message in refused.output


async def test_a_tier_that_takes_no_tools_is_passed_over(run_mesh: MeshRunner, tmp_path: Path) -> None:
    """The cascade goes on, and the tier alone says why it does not."""
    folder = shutil.copytree(FAMILY / "small", tmp_path / "takes-no-tools")
    (folder / "chat_template.jinja").write_text(NO_TOOLS)
    small = {"name": "small", "model": str(folder), "threshold": 50, "kv_tokens": 4096, "engine": "torch"}
    tools = [Tool("clock")]
    async with run_mesh([small, FORMS[1]]) as mesh, mesh.client() as client:
        events = [event async for event in client.stream("hello", tools=tools, tool_choice="required")]
        (escalated,) = (event for event in events if isinstance(event, Escalated))
        assert (escalated.from_tier, escalated.to_tier, escalated.reason) == ("small", "large", "unsupported_by_model")
        assert isinstance(events[-1], Finished)
        assert events[-1].tool_calls[0].name == "clock"
        with pytest.raises(InvalidRequestError, match="takes no tools") as refused:
            await client.generate("hello", tools=tools, model="small")
        assert refused.value.reason == "UNSUPPORTED_BY_MODEL"
        async with openai.AsyncOpenAI(base_url=f"{mesh.http}/v1", api_key="unused", max_retries=0) as http:
            with pytest.raises(openai.BadRequestError) as status:
                await http.chat.completions.create(model="small", messages=HELLO, tools=TOOLS)
            assert status.value.body["param"] == "tools"  # type: ignore[index]
            assert status.value.code == "unsupported_by_model"
            formed = await http.chat.completions.create(model="small", messages=HELLO, extra_body={"regex": "[0-9]{4}"})
            assert len(formed.choices[0].message.content or "") == 4
