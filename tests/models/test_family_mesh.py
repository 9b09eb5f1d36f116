"""The shipped mesh, as people use it: tools, forms, follow-ups, and what it does not know. The official client asks."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import yaml

from benchmarks.meshes import absolute_paths
from models.training.smalltalk import REPLIES
from penstock.services.mesh_file import read_mesh_data
from tests.conftest import ROOT
from tests.support.agent import work
from tests.support.mesh import running_mesh
from tests.support.services import RedisProcess


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


@pytest.mark.parametrize(
    ("question", "used", "answer"),
    [
        ("What is 766 times 674?", ["calculator"], "516284"),
        ("Price of hats?", ["lookup"], "31"),
        ("What is the price of 19 apples and 26 cups?", ["lookup", "lookup", "calculator"], "369"),
    ],
)
async def test_an_agent_uses_two_tools(client: openai.AsyncOpenAI, question: str, used: list[str], answer: str) -> None:
    assert await work(client, question) == (used, "stop", answer)


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
