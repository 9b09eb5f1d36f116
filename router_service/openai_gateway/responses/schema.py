"""Requests to /v1/responses. No I/O.

Nothing is stored: what refers to stored responses is refused by name. The conversation is in `input`.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from router_service.openai_gateway.objectives import SloField
from router_service.openai_gateway.schema import MAX_PARTS, CacheSalt, checked
from router_service.openai_gateway.structured import JsonObjectFormat, TextFormat, json_schema
from services.domain.errors import FieldProblem, InvalidRequest
from services.domain.requests import (
    MAX_MESSAGES,
    MAX_MODEL_CHARS,
    MAX_SEED,
    MAX_TOP_K,
    SAMPLING_DEFAULTS,
    ChatMessage,
    ChatPrompt,
    Prompt,
    SamplingParams,
    prompt_problems,
)
from services.domain.structured import StructuredOutput, StructureKind
from services.domain.tools import ANY_OBJECT, MAX_TOOLS, Tool, ToolCall, ToolChoice, ToolMode, ToolUse

Json = dict[str, Any]

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)
_Parts = Field(max_length=MAX_PARTS, fail_fast=True)


class TextPart(BaseModel):
    """A part of a message; the fields besides the text are those of replies, and are not shown to the model."""

    model_config = _STRICT

    type: Literal["input_text", "output_text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class _Item(BaseModel):
    model_config = _STRICT

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], _Parts]
    phase: str | None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: None = None
    caller: Any = None


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[TextPart], _Parts]
    caller: Any = None


class ReasoningItem(_Item):
    """Reasoning of an earlier reply, which is not shown to the model."""

    type: Literal["reasoning"]
    summary: Annotated[list[TextPart], _Parts] = []
    content: Annotated[list[TextPart], _Parts] | None = None
    encrypted_content: None = None


class FunctionTool(BaseModel):
    model_config = _STRICT

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self) -> Tool:
        parameters = ANY_OBJECT if self.parameters is None else json_schema(self.parameters)
        return Tool(self.name, self.description or "", parameters, bool(self.strict))


class NamedTool(BaseModel):
    model_config = _STRICT

    type: Literal["function"]
    name: str


class SchemaFormat(BaseModel):
    """strict: the schema is enforced either way."""

    model_config = _STRICT

    type: Literal["json_schema"]
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextOptions(BaseModel):
    model_config = _STRICT

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: None = None


class Reasoning(BaseModel):
    """summary, generate_summary: the reasoning is returned as it is, so they have no effect."""

    model_config = _STRICT

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class StreamOptions(BaseModel):
    model_config = _STRICT

    include_obfuscation: bool = False


class ResponseRequest(SloField):
    """A request. The interface is that of `schema.ChatRequest`."""

    model_config = _STRICT

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
    input: (
        str
        | Annotated[list[MessageItem | CallItem | CallOutputItem | ReasoningItem], Field(min_length=1, fail_fast=True)]
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    cache_salt: CacheSalt | None = None
    # accepted only at the value that changes nothing
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background: Literal[False] | None = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    max_tool_calls: None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    context_management: None = None
    # labels
    store: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def choices(self) -> int:
        return 1

    @cached_property
    def chat(self) -> Prompt:
        """The conversation as a prompt."""
        messages = [ChatMessage("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            messages.append(ChatMessage("user", self.input))
        else:
            messages += _messages(self.input)
        return ChatPrompt(tuple(messages), self._tool_use(), reasoning_effort=self._effort)

    @cached_property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            unset=frozenset(name for name in SAMPLING_DEFAULTS if getattr(self, name) is None),
            seed=self.seed,
            max_output_tokens=self.max_output_tokens,
            structured_output=self._structured_output(),
        )

    def predicted(self) -> str:
        return ""  # OpenAI has predictions for chats only

    @property
    def _effort(self) -> str:
        return (self.reasoning.effort if self.reasoning is not None else None) or ""

    def _tool_use(self) -> ToolUse:
        tools = tuple(tool.plain() for tool in self.tools or ())
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedTool):
            return ToolUse(tools, ToolChoice(ToolMode.REQUIRED, self.tool_choice.name, parallel=False))
        return ToolUse(tools, ToolChoice(ToolMode(self.tool_choice or "auto"), parallel=parallel))

    def _structured_output(self) -> StructuredOutput | None:
        form = self.text.format if self.text is not None else None
        if isinstance(form, JsonObjectFormat):
            return StructuredOutput(StructureKind.JSON_OBJECT)
        if isinstance(form, SchemaFormat):
            return StructuredOutput(StructureKind.JSON_SCHEMA, json_schema(form.schema_))
        return None

    def problems(self) -> Iterator[FieldProblem]:
        if not isinstance(self.input, str) and len(self.input) > MAX_MESSAGES:
            yield FieldProblem("input", f"at most {MAX_MESSAGES} items, not {len(self.input)}")
            return
        yield from self.slo_problems()
        problems = [*self.params.problems("sampling"), *prompt_problems(self.chat, "prompt")]
        if problems:
            yield from self.in_own_fields(InvalidRequest(*problems)).problems

    def in_own_fields(self, error: InvalidRequest) -> InvalidRequest:
        """An error with our field names, such as a worker's, with the names of this request's fields."""
        return type(error)(*(FieldProblem(_own_name(p.field), p.problem) for p in error.problems))


_NAMES = {
    "sampling.structured_output": "text.format.schema",
    "sampling.max_output_tokens": "max_output_tokens",
    "sampling.": "",
    "prompt.chat.tool_choice.function": "tool_choice.name",
    "prompt.chat.reasoning_effort": "reasoning.effort",
    "prompt.chat.messages": "input",
    "prompt.chat.": "",
}


def _own_name(field: str) -> str:
    for ours, theirs in _NAMES.items():
        if field.startswith(ours):
            rest = field.removeprefix(ours)
            # instructions and calls make the numbers of items others than those of messages
            return theirs if theirs in ("input", "text.format.schema") else theirs + rest
    return field


def _messages(items: list[MessageItem | CallItem | CallOutputItem | ReasoningItem]) -> list[ChatMessage]:
    """The items as messages. Calls belong to the assistant's message before them."""
    messages = list[ChatMessage]()
    for item in items:
        match item:
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                messages.append(ChatMessage(role, _text(item.content)))
            case CallItem():
                call = ToolCall(item.call_id, item.name, item.arguments)
                last = messages[-1] if messages and messages[-1].role == "assistant" else None
                if last is not None:
                    messages[-1] = ChatMessage("assistant", last.content, (*last.tool_calls, call))
                else:
                    messages.append(ChatMessage("assistant", "", (call,)))
            case CallOutputItem():
                messages.append(ChatMessage("tool", _text(item.output), tool_call_id=item.call_id))
            case ReasoningItem():
                pass
    return messages


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def parse_response(body: bytes) -> ResponseRequest:
    """Parse a body.

    Raises:
        InvalidRequest: Names every invalid field.
    """
    return checked(ResponseRequest, body)
