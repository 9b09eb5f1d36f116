"""Messages and tools as chat templates read them. No I/O."""

import json
from collections.abc import Sequence
from typing import Any

from penstock.services.tool_calls.formats import HERMES, ToolFormat
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.tools import Tool, ToolCall, arguments_object


def template_chat(prompt: ChatPrompt) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """(messages, tools or None) for a template that takes tools."""
    return [template_message(m) for m in prompt.messages], [template_tool(t) for t in prompt.tool_use.offered] or None


def template_message(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates read it. Arguments are objects there, for templates write them as JSON themselves."""
    rendered: dict[str, Any] = {"role": message.role, "content": encodable(message.content)}
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_object(call.arguments) or {}},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        rendered["tool_call_id"] = message.tool_call_id
    return rendered


def template_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
    return {"type": "function", "function": function}


def plain_chat(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """A chat for a template that knows no tools: calls are text, and a tool's result is what a user says."""
    return [
        {
            "role": "user" if message.role == "tool" else message.role,
            "content": encodable(message.content + calls_text(message.tool_calls)),
        }
        for message in messages
    ]


def calls_text(calls: Sequence[ToolCall], form: ToolFormat = HERMES) -> str:
    """Calls as a model writes them."""
    return form.separator.join(
        f'{form.begin}{{"name": {json.dumps(call.name)}, "{form.arguments_key}": {call.arguments or "{}"}}}{form.end}'
        for call in calls
    )


def encodable(text: str) -> str:
    """Text without lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()
