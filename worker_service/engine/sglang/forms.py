"""Sampling parameters and a reply's form in SGLang's own terms. No I/O.

The server compiles and enforces it. Its place in a grammar begins with the request, so a reply that moves to another server
is generated again from its start there (`moves.MovingRequests`).
"""

import json
import re
from typing import Any

from penstock.services.domain.errors import unsupported
from penstock.services.tool_calls.formats import ToolFormat
from penstock.types.prompts import ChatPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.structured import StructuredOutput, StructureKind
from penstock.types.tools import NO_TOOLS, ToolMode, ToolUse

FIELD = "sampling.structured_output"


def sampling_parameters(sampling: SamplingParams, most: int, tokens_per_event: int) -> dict[str, Any]:
    """most: output tokens. tokens_per_event: of the stream, after the first."""
    parameters: dict[str, Any] = {
        name: getattr(sampling, name)
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "ignore_eos")
    } | {
        "temperature": 0.0 if sampling.greedy else sampling.temperature or 1.0,
        "top_p": sampling.top_p or 1.0,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": most,
        "stream_interval": tokens_per_event,
    }
    if sampling.seed is not None and not sampling.greedy:
        parameters["sampling_seed"] = sampling.seed & 0x7FFFFFFF
    if sampling.logit_bias:
        parameters["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = sampling.stop_token_ids
    return parameters


def sampling_form(request: GenerationRequest, form: ToolFormat | None, *, enforces: bool) -> dict[str, Any]:
    """What to add to the sampling parameters; nothing where the model writes freely.

    form: how the model writes tool calls; None where it takes no tools. enforces: whether the server can keep a form.

    Raises:
        UnsupportedByModel: tools for a model that takes none, or a form that the server cannot keep.
    """
    added = _added(request, form)
    if added and not enforces:
        raise unsupported(FIELD, "this SGLang server was started without a tokenizer or a grammar backend")
    return added


def _added(request: GenerationRequest, form: ToolFormat | None) -> dict[str, Any]:
    structured = request.sampling.structured_output
    tool_use = request.prompt.tool_use if isinstance(request.prompt, ChatPrompt) else NO_TOOLS
    if not tool_use.offered:
        return _structure(structured) if structured is not None else {}
    if form is None:
        raise unsupported("prompt.chat.tool_use.tools", "this model's chat template takes no tools")
    required = tool_use.choice.mode is ToolMode.REQUIRED
    if structured is not None and not required:
        raise unsupported(FIELD, "cannot be combined with tools that need not be called")
    if required or any(tool.strict for tool in tool_use.offered):
        return {"structural_tag": json.dumps({"type": "structural_tag", "format": _calls(tool_use, form)})}
    return {}


def _structure(structured: StructuredOutput) -> dict[str, Any]:
    match structured.kind:
        case StructureKind.JSON_OBJECT:
            return {"json_schema": '{"type": "object"}'}
        case StructureKind.JSON_SCHEMA:
            return {"json_schema": structured.text}
        case StructureKind.REGEX:
            return {"regex": structured.text}
        case StructureKind.CHOICE:
            return {"regex": "|".join(f"({re.escape(choice)})" for choice in structured.choice)}
        case StructureKind.GRAMMAR:
            if "::=" not in structured.text:
                raise unsupported(f"{FIELD}.grammar", "this engine takes GBNF, not Lark's notation")
            return {"ebnf": structured.text}


def _calls(tool_use: ToolUse, form: ToolFormat) -> dict[str, Any]:
    """Calls as a format of structural tags: nothing but calls where one is required, else calls within free text."""
    line = "\n" if form.begin else ""
    tags = [
        {
            "type": "tag",
            "begin": f'{form.begin}{line}{{"name": {json.dumps(tool.name)}, "{form.arguments_key}": ',
            "content": {"type": "json_schema", "json_schema": json.loads(tool.parameters), "max_whitespace_cnt": 1},
            "end": f"}}{line}{form.end}",
        }
        for tool in tool_use.callable
    ]
    single = not tool_use.choice.parallel
    if tool_use.choice.mode is ToolMode.REQUIRED:
        return {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": form.separator,
            "at_least_one": True,
            "stop_after_first": single,
        }
    triggers = [form.begin or '{"name": ']
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": single}
