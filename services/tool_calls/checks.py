"""Whether a reply is of the form that was asked for. No I/O.

What a grammar has enforced passes, unless it was cut off; what a model wrote by itself may not. Schemas are checked by the
keywords that agents use: types, enumerations, properties, items. Patterns are not run here: their run time has no bound.
"""

import json
from collections.abc import Mapping
from typing import Any

from services.domain.structured import MAX_SCHEMA_DEPTH, StructuredOutput, StructureKind, json_depth
from services.domain.tools import ToolMode, ToolUse, arguments_object
from services.tool_calls.formats import FORMATS
from services.tool_calls.parser import parse_reply

INVALID_CALL = "invalid_tool_call"
INVALID_STRUCTURE = "invalid_structure"

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def reply_objection(
    text: str, tool_use: ToolUse, tool_format: str, structured_output: StructuredOutput | None
) -> str | None:
    """Why a reply does not meet the request for calls or a form; None if it does.

    tool_format: how the model writes calls; empty where that is not known.
    """
    form = FORMATS.get(tool_format)
    if tool_use.offered and form is not None:
        reply = parse_reply(text, form, "")
        if reply.malformed or (tool_use.choice.mode is ToolMode.REQUIRED and not reply.calls):
            return INVALID_CALL
        by_name = {tool.name: tool for tool in tool_use.callable}
        for call in reply.calls:
            tool = by_name.get(call.name)
            if tool is None or not fits(arguments_object(call.arguments), json.loads(tool.parameters)):
                return INVALID_CALL
        if reply.calls:
            return None
    if structured_output is not None and not _of_form(text, structured_output):
        return INVALID_STRUCTURE
    return None


def _of_form(text: str, structured_output: StructuredOutput) -> bool:
    match structured_output.kind:
        case StructureKind.CHOICE:
            return text in structured_output.choices
        case StructureKind.JSON_OBJECT | StructureKind.JSON_SCHEMA:
            if json_depth(text) > MAX_SCHEMA_DEPTH:
                return False
            try:
                value = json.loads(text)
            except ValueError:
                return False
            if structured_output.kind is StructureKind.JSON_OBJECT:
                return isinstance(value, dict)
            return fits(value, json.loads(structured_output.text))
        case _:
            return True


def fits(value: Any, schema: Any) -> bool:
    """Whether a JSON value fits a schema, as far as the keywords looked at say."""
    if not isinstance(schema, Mapping):
        return schema is not False
    kinds = schema.get("type")
    if isinstance(kinds, (str, list)) and not any(
        _is(value, k) for k in ([kinds] if isinstance(kinds, str) else kinds)
    ):
        return False
    if isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if isinstance(value, dict):
        known = schema.get("properties")
        known = known if isinstance(known, Mapping) else {}
        required = schema.get("required")
        if isinstance(required, list) and any(key not in value for key in required):
            return False
        if schema.get("additionalProperties") is False and not set(value) <= set(known):
            return False
        return all(fits(item, known[key]) for key, item in value.items() if key in known)
    if isinstance(value, list) and "items" in schema:
        return all(fits(item, schema["items"]) for item in value)
    return True


def _is(value: Any, kind: Any) -> bool:
    if not isinstance(kind, str):
        return True
    if kind in ("integer", "number") and isinstance(value, bool):
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))
