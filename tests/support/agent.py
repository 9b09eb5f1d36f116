"""An agent with the two tools that the shipped family was trained to call, by the official client."""

import json
import re
from collections.abc import Callable
from typing import Any

import openai

PRICES = {"apples": 3, "cups": 12, "cakes": 7, "hats": 31}
MOST_TURNS = 5


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


async def work(client: openai.AsyncOpenAI, question: str) -> tuple[list[str], str, str]:
    """Whether to call, which tool, and with what is the model's choice; so is when to answer.

    Returns the names of the tools that were called, why the last reply ended, and the answer.
    """
    messages: list[Any] = [{"role": "user", "content": question}]
    used = list[str]()
    for _ in range(MOST_TURNS):
        reply = await client.chat.completions.create(model="cascade", messages=messages, tools=TOOLS, temperature=0)
        (choice,) = reply.choices
        said = choice.message
        if not said.tool_calls:
            return used, choice.finish_reason, said.content or ""
        messages.append(said)  # as the client has it
        for call in said.tool_calls:
            assert call.type == "function"
            used.append(call.function.name)
            result = CALLED[call.function.name](json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError(f"no answer after {MOST_TURNS} turns: {messages}")
