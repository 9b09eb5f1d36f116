"""Requests in the format of a remote endpoint. No I/O."""

import json
from collections.abc import Collection
from typing import Any

from penstock.services.domain.errors import unsupported
from penstock.services.tool_calls.rendering import template_tool
from penstock.types.prompts import NO_EFFORT, ChatMessage, ChatPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.structured import StructuredOutput, StructureKind
from penstock.types.tools import ToolMode, ToolUse

Json = dict[str, Any]


def chat_body(
    request: GenerationRequest, model: str, extensions: Collection[str], limit_field: str, *, logprobs: bool = True
) -> Json:
    """The body of a streamed chat completion.

    extensions: of `services.mesh_schema.tiers.RemoteExtension`, those that the endpoint takes. limit_field: its name of
        the largest length of a reply. logprobs: whether the endpoint gives some; without any, they are left out where only
        the reply's own tokens are asked for.

    Raises:
        UnsupportedByModel: The request needs something that the endpoint does not have.
    """
    prompt, sampling = request.prompt, request.sampling
    if not isinstance(prompt, ChatPrompt):
        raise unsupported("prompt", "this tier is a remote endpoint, which takes chats")
    body: Json = {
        "model": model,
        "messages": [_message(message) for message in prompt.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.max_tokens is not None:
        body[limit_field] = sampling.max_tokens
    body |= _logprobs(sampling.top_logprobs, given=logprobs) | _sampling(sampling, extensions)
    if sampling.structured_output is not None:
        body |= _form(sampling.structured_output, extensions)
    if prompt.tool_use.offered:
        body |= _tools(prompt.tool_use)
    return body | _reasoning(prompt, extensions)


def _logprobs(top: int | None, *, given: bool) -> Json:
    if top is None or not (given or top):
        return {}
    if not given:
        raise unsupported("sampling.top_logprobs", "this tier's endpoint gives no log-probabilities")
    return {"logprobs": True, "top_logprobs": max(1, top)}  # for 0, llama.cpp gives none at all


def _sampling(sampling: SamplingParams, extensions: Collection[str]) -> Json:
    values: Json = {name: value for name in ("temperature", "top_p") if (value := getattr(sampling, name)) is not None}
    if sampling.seed is not None and not sampling.greedy:
        values["seed"] = sampling.seed & 0x7FFFFFFF  # some endpoints take 32 bits
    for name in ("frequency_penalty", "presence_penalty"):
        if value := getattr(sampling, name):
            values[name] = value
    if sampling.logit_bias:
        values["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    for name, neutral in (
        ("top_k", 0),
        ("min_p", 0.0),
        ("repetition_penalty", 1.0),
        ("stop_token_ids", ()),
        ("ignore_eos", False),
    ):
        if (value := getattr(sampling, name)) not in (None, neutral):
            _needs(name, f"sampling.{name}", extensions)
            values[name] = value
    return values


def _form(form: StructuredOutput, extensions: Collection[str]) -> Json:
    match form.kind:
        case StructureKind.JSON_OBJECT:
            return {"response_format": {"type": "json_object"}}
        case StructureKind.JSON_SCHEMA:
            schema = {"name": "reply", "schema": json.loads(form.text), "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case kind:
            _needs("structured_outputs", "sampling.structured_output", extensions)
            return {"structured_outputs": {kind.value: list(form.choice) or form.text}}


def _tools(tool_use: ToolUse) -> Json:
    choice = tool_use.choice
    named = {"type": "function", "function": {"name": choice.function}}
    tools = []
    for tool in tool_use.offered:
        described = template_tool(tool)
        described["function"] |= {"strict": True} if tool.strict else {}
        tools.append(described)
    body: Json = {"tools": tools}
    if choice.mode is ToolMode.REQUIRED:
        body["tool_choice"] = named if choice.function else "required"
    if not choice.parallel and not choice.function:
        body["parallel_tool_calls"] = False
    return body


def _reasoning(prompt: ChatPrompt, extensions: Collection[str]) -> Json:
    wish, effort = prompt.wants_reasoning, prompt.reasoning_effort
    if wish is None:
        return {}
    if effort and effort != NO_EFFORT:
        _needs("reasoning_effort", "prompt.chat.reasoning_effort", extensions)
        return {"reasoning_effort": effort}
    if "chat_template_kwargs" in extensions:
        return {"chat_template_kwargs": {"enable_thinking": wish, "thinking": wish}}
    field = "prompt.chat.thinking" if prompt.thinking is not None else "prompt.chat.reasoning_effort"
    _needs("reasoning_effort" if not wish else "chat_template_kwargs", field, extensions)
    return {"reasoning_effort": NO_EFFORT}


def _message(message: ChatMessage) -> Json:
    body: Json = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments or "{}"}}
            for c in message.tool_calls
        ]
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    return body


def _needs(extension: str, field: str, extensions: Collection[str]) -> None:
    if extension not in extensions:
        raise unsupported(field, f"this tier's endpoint does not take `{extension}` (openai.extensions)")
