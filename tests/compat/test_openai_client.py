"""The official `openai` client: what it sends is taken, and what it gets is what its own types say."""

import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.compat.conftest import CompatMesh
from tests.support.present import present

QUESTION: Any = [{"role": "user", "content": "What is 12 + 30?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "unit": {"enum": ["m", "ft"]}},
    "required": ["x", "unit"],
    "additionalProperties": False,
}
FLAT_TOOL: Any = {"type": "function", "name": "convert", "parameters": PARAMETERS, "strict": True}


class Person(pydantic.BaseModel):
    name: str
    title: Literal["Dr", "Ms"]


async def test_the_stream_helper_joins_a_reply(client: openai.AsyncOpenAI, mesh: CompatMesh) -> None:
    async with client.chat.completions.stream(
        model=mesh.tools, messages=QUESTION, response_format=Person, temperature=0
    ) as stream:
        async for _ in stream:
            pass
        reply = await stream.get_final_completion()
    assert isinstance(reply.choices[0].message.parsed, Person)


async def test_responses_whole_and_streamed_are_the_same(client: openai.AsyncOpenAI, mesh: CompatMesh) -> None:
    asked: Any = {"model": mesh.chat, "input": "What is 12 + 30?", "instructions": "Answer.", "temperature": 0}
    whole = await client.responses.create(**asked, max_output_tokens=10)
    assert whole.output_text
    assert whole.status in ("completed", "incomplete")
    assert present(whole.usage).output_tokens > 0
    deltas, kinds, numbers, last = "", list[str](), list[int](), None
    async for event in await client.responses.create(**asked, max_output_tokens=10, stream=True):
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            deltas += event.delta
        if event.type in ("response.completed", "response.incomplete"):
            last = event.response
    assert deltas == whole.output_text
    assert present(last).output_text == whole.output_text
    assert present(last).status == whole.status
    assert numbers == list(range(len(numbers)))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    around = [kind for kind in kinds if "delta" not in kind][2:-1]
    assert around == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]


async def test_responses_call_tools_and_go_on(client: openai.AsyncOpenAI, mesh: CompatMesh) -> None:
    """The output is sent back as input, with the results. Streamed arguments join to the whole ones."""
    asked: Any = {"model": mesh.tools, "tools": [FLAT_TOOL], "tool_choice": "required", "temperature": 0}
    first = await client.responses.create(**asked, input="Convert.")
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls
    assert all(json.loads(call.arguments)["unit"] in ("m", "ft") for call in calls)
    arguments = dict[str, str]()
    async for event in await client.responses.create(**asked, input="Convert.", stream=True):
        if event.type == "response.function_call_arguments.delta":
            arguments[event.item_id] = arguments.get(event.item_id, "") + event.delta
        if event.type == "response.function_call_arguments.done":
            assert event.arguments == arguments[event.item_id]
    assert list(arguments.values()) == [call.arguments for call in calls]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
    turns: Any = [{"role": "user", "content": "Convert."}, *first.output, *results]
    again = await client.responses.create(
        model=mesh.tools, tools=[FLAT_TOOL], tool_choice="none", input=turns, temperature=0
    )
    assert again.output_text


async def test_responses_parse_into_the_clients_class(client: openai.AsyncOpenAI, mesh: CompatMesh) -> None:
    reply = await client.responses.parse(model=mesh.tools, input="Who?", text_format=Person, temperature=0)
    assert isinstance(reply.output_parsed, Person)
    async with client.responses.stream(model=mesh.tools, input="Who?", text_format=Person, temperature=0) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert isinstance(final.output_parsed, Person)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image_generation_call", "id": "x"}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice.name"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}}, "text.format.schema"),
    ],
)
async def test_what_responses_cannot_do_is_named(
    client: openai.AsyncOpenAI, mesh: CompatMesh, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.post("/responses", body={"model": mesh.tools, "input": "x"} | fields, cast_to=object)
    assert (refused.value.param or "").startswith(name)
