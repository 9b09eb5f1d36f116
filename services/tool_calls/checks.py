"""Whether a reply is of the form that was asked for. No I/O.

What a grammar has enforced passes, unless it was cut off; what a model wrote by itself may not.
"""

import json

from penstock.services.json_schema import SchemaTooComplex, Steps, fits
from penstock.services.tool_calls.formats import FORMATS
from penstock.services.tool_calls.parser import parse_reply
from penstock.types.prompts import ChatPrompt, Prompt
from penstock.types.structured import StructuredOutput, StructureKind, json_value
from penstock.types.tools import ToolMode, arguments_object

INVALID_CALL = "invalid_tool_call"
INVALID_STRUCTURE = "invalid_structure"


def reply_objection(
    text: str, prompt: Prompt, tool_format: str, structured_output: StructuredOutput | None
) -> str | None:
    """Why a reply does not meet the request for calls or a form; None if it does.

    tool_format: how the model writes calls; empty where that is not known.
    """
    form = FORMATS.get(tool_format)
    if isinstance(prompt, ChatPrompt) and (tool_use := prompt.tool_use).offered and form is not None:
        reply = parse_reply(text, form, "", prompt)
        if reply.malformed or (tool_use.choice.mode is ToolMode.REQUIRED and not reply.calls):
            return INVALID_CALL
        steps = Steps()
        by_name = {tool.name: tool for tool in tool_use.callable}
        for call in reply.calls:
            tool = by_name.get(call.name)
            if tool is None or not _may_fit(arguments_object(call.arguments), json.loads(tool.parameters), steps):
                return INVALID_CALL
        if reply.calls:
            return None
    if structured_output is not None and not _of_form(text, structured_output):
        return INVALID_STRUCTURE
    return None


def _of_form(text: str, structured_output: StructuredOutput) -> bool:
    match structured_output.kind:
        case StructureKind.CHOICE:
            return text in structured_output.choice
        case StructureKind.JSON_OBJECT | StructureKind.JSON_SCHEMA:
            try:
                value = json_value(text)
            except ValueError:
                return False
            if structured_output.kind is StructureKind.JSON_OBJECT:
                return isinstance(value, dict)
            return _may_fit(value, json.loads(structured_output.text), Steps())
        case _:
            return True


def _may_fit(value: object, schema: object, steps: Steps) -> bool:
    """Whether a value fits a schema; what takes too long to find out is no reason to refuse a reply."""
    try:
        return fits(value, schema, steps)
    except SchemaTooComplex:
        return True
