"""Tools in OpenAI's format: in requests, messages and replies. No I/O."""

import json
from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.router_service.openai_gateway.json_values import StrictModel
from penstock.services.tool_calls.formats import ToolFormat
from penstock.services.tool_calls.parser import CallDelta, ContentDelta, ToolCallParser, call_id
from penstock.types.prompts import ChatPrompt
from penstock.types.tools import (
    ANY_OBJECT,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    NO_TOOLS,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    ToolUse,
)

Json = dict[str, Any]


class OfFunction(StrictModel):
    type: Literal["function"]


class FunctionName(StrictModel):
    name: str


class FunctionSpec(FunctionName):
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self) -> Tool:
        parameters = ANY_OBJECT if self.parameters is None else json.dumps(self.parameters, ensure_ascii=False)
        return Tool(self.name, self.description or "", parameters, bool(self.strict))


class ToolSpec(OfFunction):
    function: FunctionSpec


class NamedTool(OfFunction):
    function: FunctionName


class CalledFunction(FunctionName):
    arguments: str


class MessageToolCall(StrictModel):
    """A call in an assistant's message, as in a reply. index: of a streamed call; some clients keep it."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    provider_specific_fields: Any = None

    def plain(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


ChoiceMode = Literal["none", "auto", "required"]


def tool_use(
    tools: Seq[FunctionSpec], choice: ChoiceMode | FunctionName | None, parallel_tool_calls: bool | None
) -> ToolUse:
    """What a request says of tools. choice: how they may be used, or the one that must be."""
    offered, parallel = tuple(tool.plain() for tool in tools), parallel_tool_calls is not False
    if isinstance(choice, FunctionName):
        return ToolUse(offered, ToolChoice(ToolMode.REQUIRED, choice.name, parallel=False))
    return ToolUse(offered, ToolChoice(ToolMode(choice or "auto"), parallel=parallel))


class ToolFields(StrictModel):
    """The fields of a request about tools. Without tools they have no effect."""

    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ChoiceMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # deprecated names of the above: accepted only empty
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None

    def tool_use(self) -> ToolUse:
        if self.model_fields_set.isdisjoint(_TOOL_FIELDS):
            return NO_TOOLS
        choice = self.tool_choice.function if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        return tool_use([tool.function for tool in self.tools or ()], choice, self.parallel_tool_calls)


_TOOL_FIELDS = frozenset(ToolFields.model_fields)
MessageToolCalls = Annotated[list[MessageToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)]


def called(calls: tuple[ToolCall, ...]) -> list[Json]:
    """Calls in the format of a message."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


class ToolDeltas:
    """The deltas of one streamed choice: its text without the calls, and the calls in pieces."""

    def __init__(self, form: ToolFormat, request_id: str, prompt: ChatPrompt) -> None:
        """request_id: of this choice; the ids of the calls are derived from it."""
        self._parser, self._request_id = ToolCallParser(form, prompt), request_id

    def push(self, text: str) -> list[Json]:
        return [self._delta(part) for part in self._parser.push(text)]

    def finish(self) -> list[Json]:
        return [self._delta(part) for part in self._parser.finish()]

    def _delta(self, part: ContentDelta | CallDelta) -> Json:
        if isinstance(part, ContentDelta):
            return {"content": part.text}
        call: Json = {"index": part.index, "function": {"arguments": part.arguments}}
        if part.name:
            call |= {"id": call_id(self._request_id, part.index), "type": "function"}
            call["function"]["name"] = part.name
        return {"tool_calls": [call]}
