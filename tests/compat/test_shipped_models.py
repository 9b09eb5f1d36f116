"""An agent and a form filler at the shipped models: what they say is right, not only well formed."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest

from tests.compat.conftest import CompatMesh

PRICES = {"cakes": 7, "hats": 31}
ITEMS = {
    "type": "object",
    "properties": {"key": {"type": "string"}},
    "required": ["key"],
    "additionalProperties": False,
}
SUMS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "lookup", "description": "Price lookup.", "parameters": ITEMS}},
    {"type": "function", "function": {"name": "calculator", "description": "A calculator.", "parameters": SUMS}},
]


class Sale(pydantic.BaseModel):
    city: str
    item: str
    price: int


@pytest.fixture
async def client(mesh: CompatMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=mesh.url, api_key="unused", max_retries=0) as made:
        yield made


def result_of(name: str, arguments: dict[str, str]) -> str:
    """What the tool says."""
    if name == "lookup":
        return str(PRICES[arguments["key"]])
    factors = re.fullmatch(r"(\d+)\*(\d+)(?:\+(\d+)\*(\d+))?", arguments["expression"].replace(" ", ""))
    assert factors is not None, arguments
    a, b, c, d = (int(factor or 0) for factor in factors.groups())
    return str(a * b + c * d)


@pytest.mark.parametrize(
    ("question", "answer", "calls"),
    [
        ("Price of hats?", "31", ["lookup"]),
        ("How much do 28 cakes cost?", "196", ["lookup", "calculator"]),
        ("What do 3 hats and 12 cakes cost?", "177", ["lookup", "lookup", "calculator"]),
    ],
)
async def test_an_agent_that_is_free_to_choose_calls_tools_until_it_knows(
    client: openai.AsyncOpenAI, question: str, answer: str, calls: list[str]
) -> None:
    """Whether to call, which tool, and with what is the model's choice; so is when to stop."""
    messages: list[Any] = [{"role": "user", "content": question}]
    made = list[str]()
    for _ in range(len(calls) + 1):
        reply = await client.chat.completions.create(
            model=CompatMesh.tools, messages=messages, tools=TOOLS, temperature=0, max_tokens=120
        )
        (choice,) = reply.choices
        messages.append(choice.message)
        for call in choice.message.tool_calls or ():
            assert call.type == "function"
            made.append(call.function.name)
            content = result_of(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        if choice.finish_reason != "tool_calls":
            break
    assert (made, choice.finish_reason, choice.message.content) == (calls, "stop", answer)


async def test_a_form_is_filled_with_what_the_sentence_says(client: openai.AsyncOpenAI) -> None:
    """Whole, and streamed by the client's own helper."""
    text = "The balls cost 112 coins in Dublin. Give city, item, price as a JSON object."
    asked: Any = {"model": CompatMesh.tools, "messages": [{"role": "user", "content": text}], "response_format": Sale}
    asked |= {"temperature": 0, "max_tokens": 120}
    sale = Sale(city="Dublin", item="balls", price=112)
    whole = await client.chat.completions.parse(**asked)
    assert whole.choices[0].message.parsed == sale
    async with client.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        reply = await stream.get_final_completion()
    assert reply.choices[0].message.parsed == sale
