"""An agent and a form filler at the shipped models: what they say is right, not only well formed."""

from typing import Any

import openai
import pydantic
import pytest

from tests.compat.conftest import CompatMesh
from tests.support.agent import work


class Sale(pydantic.BaseModel):
    city: str
    item: str
    price: int


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
    assert await work(client, question, CompatMesh.tools) == (calls, "stop", answer)


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
