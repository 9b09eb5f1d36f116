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


@tool
def add(x: int, y: int) -> int:
    """Adds."""
    return x + y


@tool
def shout(word: Literal["yes", "no"]) -> str:
    """Shouts."""
    return word.upper()


TOOLS = {one.name: one for one in (add, shout)}


def agent(model: Any) -> list[str]:
    """Two rounds of calls, then an answer: the kinds of the messages."""
    messages: list[Any] = [HumanMessage(QUESTION)]
    for choice in ("any", "any", "none"):
        reply = model.bind_tools([*TOOLS.values()], tool_choice=choice).invoke(messages)
        messages.append(reply)
        for call in reply.tool_calls:
            result = TOOLS[call["name"]].invoke(call["args"])
            messages.append(ToolMessage(str(result), tool_call_id=call["id"]))
    return [message.type for message in messages]


def main(url: str) -> dict[str, Any]:
    def client(model: str, **options: Any) -> ChatOpenAI:
        return ChatOpenAI(base_url=url, api_key="unused", model=model, temperature=0, max_retries=0, **options)

    chat, tools = client("cascade", max_tokens=12), client("simulated")
    responses = client("simulated", use_responses_api=True)
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
