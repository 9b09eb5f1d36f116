"""Chats, tools and forms in the contract's messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from penstock.client import types
from penstock.proto.common.v1 import common_pb2

_MODES = {
    "auto": common_pb2.TOOL_MODE_AUTO,
    "none": common_pb2.TOOL_MODE_NONE,
    "required": common_pb2.TOOL_MODE_REQUIRED,
}


def prompt_to_proto(prompt: types.Prompt, options: types.Options) -> common_pb2.Prompt:
    """Text, a chat or token ids.

    Raises:
        TypeError: it is anything else.
        ValueError: tools are given for a prompt that is no chat.
    """
    if isinstance(prompt, str) and not options.raw:
        prompt = [{"role": "user", "content": prompt}]
    tokens = not isinstance(prompt, str) and bool(prompt) and all(isinstance(item, int) for item in prompt)
    if isinstance(prompt, str) or tokens:
        if options.tools:
            raise ValueError("tools need a chat: they are no part of raw text or token ids")
        if options.thinking is not None or options.reasoning_effort:
            raise ValueError("thinking and reasoning_effort need a chat: its template switches them")
        if isinstance(prompt, str):
            return common_pb2.Prompt(text=prompt)
        return common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=cast("Sequence[int]", prompt)))
    try:
        chat = common_pb2.ChatPrompt(messages=[_message(m) for m in cast("Sequence[types.Message]", prompt)])
    except (KeyError, TypeError) as error:
        raise TypeError(f"a prompt is text, token ids or messages with role and content: {error!r}") from error
    if options.tools:
        chat.tools.extend(_tool(tool) for tool in options.tools)
        named = options.tool_choice is not None and options.tool_choice not in _MODES
        chat.tool_choice.mode = _MODES["required" if named else options.tool_choice or "auto"]
        chat.tool_choice.function = options.tool_choice or "" if named else ""
        chat.tool_choice.single_call = named or not options.parallel_tool_calls
    elif options.tool_choice not in (None, "auto", "none"):
        raise ValueError(f"tool_choice '{options.tool_choice}' without tools")
    if options.thinking is not None:
        chat.thinking = options.thinking
    chat.reasoning_effort = options.reasoning_effort
    return common_pb2.Prompt(chat=chat)


def structured_output_to_proto(form: types.StructuredOutput) -> common_pb2.StructuredOutput:
    """The form of a reply.

    Raises:
        ValueError: not exactly one field is set.
    """
    given = {
        "json_object": form.json_object or None,
        "json_schema": form.json_schema
        if isinstance(form.json_schema, str | None)
        else json.dumps(form.json_schema, ensure_ascii=False),
        "regex": form.regex,
        "grammar": form.grammar,
        "choice": common_pb2.Choices(texts=form.choice) if form.choice else None,
    }
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if len(fields) != 1:
        raise ValueError(f"structured_output: exactly one of {', '.join(given)} is needed, not {len(fields)}")
    return common_pb2.StructuredOutput(**fields)


def calls_from_proto(calls: Sequence[common_pb2.ToolCall]) -> tuple[types.ToolCall, ...]:
    return tuple(types.ToolCall(call.id, call.name, call.arguments_json) for call in calls)


def _message(message: types.Message) -> common_pb2.ChatMessage:
    return common_pb2.ChatMessage(
        role=message["role"],
        content=message["content"] or "",
        tool_calls=[_call(call) for call in message.get("tool_calls") or ()],
        tool_call_id=message.get("tool_call_id") or "",
    )


def _call(call: types.ToolCall | Mapping[str, Any]) -> common_pb2.ToolCall:
    if isinstance(call, types.ToolCall):
        return common_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments)
    function = call["function"]
    return common_pb2.ToolCall(id=call.get("id") or "", name=function["name"], arguments_json=function["arguments"])


def _tool(tool: types.Tool) -> common_pb2.Tool:
    return common_pb2.Tool(
        name=tool.name,
        description=tool.description,
        parameters_json=json.dumps(tool.parameters, ensure_ascii=False),
        strict=tool.strict,
    )
