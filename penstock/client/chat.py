"""Prompts of the clients as values."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from penstock.client import types
from penstock.types.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from penstock.types.tools import NO_TOOLS, ToolCall, ToolChoice, ToolMode, ToolUse


def prompt_value(prompt: types.Prompt, options: types.Options) -> Prompt:
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
        return TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(tuple(cast("Sequence[int]", prompt)))
    try:
        messages = tuple([_message(message) for message in cast("Sequence[types.Message]", prompt)])
    except (KeyError, TypeError) as error:
        raise TypeError(f"a prompt is text, token ids or messages with role and content: {error!r}") from error
    return ChatPrompt(messages, _tool_use(options), options.thinking, options.reasoning_effort)


def _tool_use(options: types.Options) -> ToolUse:
    choice = options.tool_choice
    if not options.tools:
        if choice not in (None, "auto", "none"):
            raise ValueError(f"tool_choice '{choice}' without tools")
        return NO_TOOLS
    if choice is None or choice in tuple(ToolMode):
        mode = ToolMode(choice or "auto")
        return ToolUse(tuple(options.tools), ToolChoice(mode, parallel=options.parallel_tool_calls))
    return ToolUse(tuple(options.tools), ToolChoice(ToolMode.REQUIRED, choice, parallel=False))


def _message(message: types.Message) -> ChatMessage:
    return ChatMessage(
        message["role"],
        message["content"] or "",
        tuple([_call(call) for call in message.get("tool_calls") or ()]),
        message.get("tool_call_id") or "",
    )


def _call(call: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call["function"]
    return ToolCall(call.get("id") or "", function["name"], function["arguments"])
