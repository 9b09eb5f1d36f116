"""A reply's form in SGLang's own sampling parameters. No I/O.

The server compiles and enforces it. Its place in a grammar begins with the request, so a reply that moves to another server
is generated again from its start there (`moves.MovingRequests`).
"""

import json
import re
from typing import Any

from services.domain.errors import FieldProblem, UnsupportedByModel
from services.domain.requests import ChatPrompt, GenerationRequest
from services.domain.structured import StructuredOutput, StructureKind
from services.domain.tools import NO_TOOLS, ToolMode, ToolUse
from services.tool_calls import ToolFormat

FIELD = "sampling.structured_output"


def sampling_form(request: GenerationRequest, form: ToolFormat | None) -> dict[str, Any]:
    """What to add to the sampling parameters; nothing where the model writes freely.

    form: how the model writes tool calls; None where it takes no tools.

    Raises:
        UnsupportedByModel: tools for a model that takes none, or a form that the server's parameters cannot say.
    """
    structured = request.sampling.structured_output
    tool_use = request.prompt.tool_use if isinstance(request.prompt, ChatPrompt) else NO_TOOLS
    if not tool_use.offered:
        return _structure(structured) if structured is not None else {}
    if form is None:
        raise UnsupportedByModel(FieldProblem("prompt.chat.tools", "this model's chat template takes no tools"))
    required = tool_use.choice.mode is ToolMode.REQUIRED
    if structured is not None and not required:
        raise UnsupportedByModel(FieldProblem(FIELD, "cannot be combined with tools that need not be called"))
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
            return {"regex": "|".join(f"({re.escape(choice)})" for choice in structured.choices)}
        case StructureKind.GRAMMAR:
            if "::=" not in structured.text:
                raise UnsupportedByModel(
                    FieldProblem(f"{FIELD}.grammar", "this engine takes GBNF, not Lark's notation")
                )
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
