"""How models write tool calls, and how calls are read from their replies. No I/O."""

from penstock.services.tool_calls.checks import reply_objection
from penstock.services.tool_calls.formats import FORMATS, HERMES, LLAMA3_JSON, ToolFormat, format_of_template
from penstock.services.tool_calls.parser import (
    CallDelta,
    ContentDelta,
    ParsedReply,
    ToolCallParser,
    call_id,
    parse_reply,
)
from penstock.services.tool_calls.rendering import calls_text, encodable, plain_chat, template_chat

__all__ = [
    "FORMATS",
    "HERMES",
    "LLAMA3_JSON",
    "CallDelta",
    "ContentDelta",
    "ParsedReply",
    "ToolCallParser",
    "ToolFormat",
    "call_id",
    "calls_text",
    "encodable",
    "format_of_template",
    "parse_reply",
    "plain_chat",
    "reply_objection",
    "template_chat",
]
