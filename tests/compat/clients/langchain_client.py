"""What LangChain gets from the API at argv[1], as JSON. Run by the Python that has LangChain."""

import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

QUESTION = "What is 12 + 30?"


class Person(BaseModel):
    """Somebody."""

    name: str
    title: Literal["Dr", "Ms"]


class AnyObject(BaseModel):
    model_config = ConfigDict(extra="allow")


PRICES = {"cakes": 7}


@tool
def lookup(key: str) -> int:
    """Price lookup."""
    return PRICES[key]


@tool
def calculator(expression: str) -> int:
    """A calculator."""
    a, b = expression.split("*")
    return int(a) * int(b)


TOOLS = {one.name: one for one in (lookup, calculator)}
MOST_TURNS = 5


def agent(model: Any) -> dict[str, Any]:
    """A loop that ends when the model calls no tool: the tools that it called, and its answer."""
    able, messages, called = model.bind_tools([*TOOLS.values()]), [HumanMessage("How much do 28 cakes cost?")], []
    for _ in range(MOST_TURNS):
        reply = able.invoke(messages)
        messages.append(reply)
        if not reply.tool_calls:
            return {"called": called, "answer": reply.text}
        for call in reply.tool_calls:
            called.append(call["name"])
            messages.append(ToolMessage(str(TOOLS[call["name"]].invoke(call["args"])), tool_call_id=call["id"]))
    return {"called": called, "answer": None}


def main(url: str) -> dict[str, Any]:
    def client(model: str, **options: Any) -> ChatOpenAI:
        return ChatOpenAI(base_url=url, api_key="unused", model=model, temperature=0, max_retries=0, **options)

    chat, tools = client("cascade", max_tokens=12), client("large")
    responses = client("large", use_responses_api=True)
    streamed = list(chat.stream(QUESTION))
    structured = {
        method: tools.with_structured_output(form, method=method).invoke("Who?").model_dump()
        for method, form in (("function_calling", Person), ("json_schema", Person), ("json_mode", AnyObject))
    }
    return {
        "invoke": chat.invoke(QUESTION).content,
        "stream": "".join(str(chunk.content) for chunk in streamed),
        "usage": streamed[-1].usage_metadata or chat.invoke(QUESTION).usage_metadata,
        "structured": structured,
        "agent": agent(tools),
        "responses": responses.invoke(QUESTION).text,
        "responses_stream": "".join(chunk.text for chunk in responses.stream(QUESTION)),
        "responses_agent": agent(responses),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1]), default=str))
