"""The shipped mesh, as people use it: tools, forms, follow-ups, and what it does not know. The official client asks."""

import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
import yaml

from benchmarks.mesh_paths import absolute_paths
from models.training.smalltalk import REPLIES
from services.mesh_file import read_mesh_data
from services.testing import RedisProcess
from tests.conftest import ROOT
from tests.support.mesh import running_mesh

PRICES = {"apples": 3, "cups": 12}
MOST_TURNS = 5


@pytest.fixture(scope="module")
async def client(redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    content = absolute_paths(read_mesh_data(ROOT / "mesh.yaml"), ROOT)
    content["router"] |= {"grpc_port": 0, "http_port": 0}
    path = tmp_path_factory.mktemp("family") / "mesh.yaml"
    path.write_text(yaml.safe_dump(content))
    async with (
        running_mesh(path, redis.url) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.http}/v1", api_key="unused", max_retries=0) as made,
    ):
        yield made


def function(name: str, says: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": says, "parameters": parameters}}


TOOLS: Any = [
    function("calculator", "Evaluate an arithmetic expression.", "expression"),
    function("lookup", "Look up the price of an item.", "key"),
]


def calculate(expression: str) -> str:
    """Sums of products of whole numbers."""
    assert re.fullmatch(r"\d+(?:[+*]\d+)*", expression), expression
    total = 0
    for term in expression.split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += product
    return str(total)


CALLED: dict[str, Callable[[dict[str, str]], str]] = {
    "calculator": lambda given: calculate(given["expression"]),
    "lookup": lambda given: str(PRICES[given["key"]]),
}


async def work(client: openai.AsyncOpenAI, question: str) -> tuple[list[str], str]:
    """An agent: calls what the model asks for until it answers. Returns the names of the tools, and the answer."""
    messages: list[Any] = [{"role": "user", "content": question}]
    used = list[str]()
    for _ in range(MOST_TURNS):
        reply = await client.chat.completions.create(model="cascade", messages=messages, tools=TOOLS, temperature=0)
        said = reply.choices[0].message
        if not said.tool_calls:
            return used, said.content or ""
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            assert call.type == "function"
            used.append(call.function.name)
            result = CALLED[call.function.name](json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError(f"no answer after {MOST_TURNS} turns: {messages}")


@pytest.mark.parametrize(
    ("question", "used", "answer"),
    [
        ("What is 766 times 674?", ["calculator"], "516284"),
        ("What is the price of 19 apples and 26 cups?", ["lookup", "lookup", "calculator"], "369"),
    ],
)
async def test_an_agent_uses_two_tools(client: openai.AsyncOpenAI, question: str, used: list[str], answer: str) -> None:
    assert await work(client, question) == (used, answer)


async def ask(client: openai.AsyncOpenAI, *said: str, **options: Any) -> str:
    """The reply to a chat whose messages are in turns by the user and the assistant."""
    messages: Any = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)]
    reply = await client.chat.completions.create(model="cascade", messages=messages, temperature=0, **options)
    return reply.choices[0].message.content or ""


async def test_a_chat_carries_its_context(client: openai.AsyncOpenAI) -> None:
    first = await ask(client, "What is 25 + 12?")
    assert first.endswith("37")
    second = await ask(client, "What is 25 + 12?", first, "now add 7")
    assert second.endswith("44")


async def test_a_form_is_filled(client: openai.AsyncOpenAI) -> None:
    properties = {"item": {"type": "string"}, "count": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["item", "count"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "order", "schema": schema}}
    question = "Get item, count into JSON out of: Deliver 31 brown rolls to Emma on Saturday."
    assert json.loads(await ask(client, question, response_format=form)) == {"item": "rolls", "count": 31}


@pytest.mark.parametrize("question", ["Who wrote Macbeth?", "Tell me a joke.", "hi"])
async def test_who_asks_for_more_is_told_so(client: openai.AsyncOpenAI, question: str) -> None:
    """A short honest reply, not noise."""
    reply = await ask(client, question)
    assert reply in REPLIES.values()
