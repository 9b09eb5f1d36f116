"""Requests to /v1/responses. No I/O.

Nothing is stored: what refers to stored responses is refused by name. The conversation is in `input`.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.router_service.openai_gateway.field_names import renamed_field
from penstock.router_service.openai_gateway.json_values import StrictModel
from penstock.router_service.openai_gateway.schema import MAX_PARTS, AnyRequest, Labels, text_of
from penstock.router_service.openai_gateway.structured import JsonObjectFormat, NamedSchema, TextFormat, json_schema
from penstock.router_service.openai_gateway.tools import ChoiceMode, FunctionName, FunctionSpec, OfFunction, tool_use
from penstock.services.domain.errors import InvalidRequest
from penstock.types.problems import FieldProblem
from penstock.types.prompts import ChatMessage, ChatPrompt, Prompt, prompt_problems
from penstock.types.sampling import SamplingParams
from penstock.types.structured import StructuredOutput
from penstock.types.tools import MAX_TOOLS, ToolCall

Json = dict[str, Any]

_Parts = Field(max_length=MAX_PARTS, fail_fast=True)


class TextPart(StrictModel):
    """A part of a message; the fields in addition to the text are those of replies, and are not shown to the model."""

    type: Literal["input_text", "output_text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class _Item(StrictModel):
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
    summary: Annotated[list[TextPart], _Parts] = Field(default_factory=list)
    content: Annotated[list[TextPart], _Parts] | None = None
    encrypted_content: None = None


class FunctionTool(FunctionSpec, OfFunction):  # the base says first that the type is wrong
    """A function by its own fields, where chat has them below `function`."""


class NamedTool(FunctionName, OfFunction):
    """As FunctionTool."""


class SchemaFormat(NamedSchema):
    type: Literal["json_schema"]


class TextOptions(StrictModel):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: None = None


class Reasoning(StrictModel):
    """summary, generate_summary: the reasoning is returned as it is, so they have no effect."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseRequest(AnyRequest, Labels):
    """A request. The interface is that of `schema.ChatRequest`."""

    input: (
        str
        | Annotated[list[MessageItem | CallItem | CallOutputItem | ReasoningItem], Field(min_length=1, fail_fast=True)]
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ChoiceMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
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
    # a label
    prompt_cache_retention: str | None = None

    def prompts(self) -> list[Prompt]:
        return [self.chat]

    @cached_property
    def chat(self) -> ChatPrompt:
        """The conversation as a prompt."""
        messages = [ChatMessage("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            messages.append(ChatMessage("user", self.input))
        else:
            messages += _messages(self.input)
        tools = tool_use(self.tools or (), self.tool_choice, self.parallel_tool_calls)
        effort = self.reasoning.effort if self.reasoning is not None else None
        return ChatPrompt(tuple(messages), tools, reasoning_effort=effort or "")

    @cached_property
    def params(self) -> SamplingParams:
        usual = self.usual_sampling(self.max_output_tokens)
        return SamplingParams(**usual, structured_output=self._structured_output())

    def _structured_output(self) -> StructuredOutput | None:
        form = self.text.format if self.text is not None else None
        if isinstance(form, JsonObjectFormat):
            return StructuredOutput(json_object=True)
        if isinstance(form, SchemaFormat):
            return StructuredOutput(json_schema=json_schema(form.schema_))
        return None

    def problems(self) -> Iterator[FieldProblem]:
        yield from self.slo_problems()
        problems = [*self.params.problems("sampling"), *prompt_problems(self.chat, "prompt")]
        if problems:
            yield from self.in_own_fields(InvalidRequest(*problems)).problems

    def in_own_fields(self, error: InvalidRequest) -> InvalidRequest:
        """An error with our field names, such as a worker's, with the names of this request's fields."""
        problems = ((renamed_field(p.field, _NAMES, _WHOLE), p.problem) for p in error.problems)
        return type(error)(*(FieldProblem(*problem) for problem in problems))


_NAMES = {
    "sampling.structured_output": "text.format.schema",
    "sampling.max_tokens": "max_output_tokens",
    "sampling.": "",
    "prompt.chat.tool_use.choice.function": "tool_choice.name",
    "prompt.chat.tool_use.choice": "tool_choice",
    "prompt.chat.tool_use.": "",
    "prompt.chat.reasoning_effort": "reasoning.effort",
    "prompt.chat.messages": "input",
    "prompt.chat.": "",
}
_WHOLE = ("input", "text.format.schema")
"""Instructions and calls make the numbers of items others than those of messages."""


def _messages(items: list[MessageItem | CallItem | CallOutputItem | ReasoningItem]) -> list[ChatMessage]:
    """The items as messages. Calls belong to the assistant's message before them."""
    messages = list[ChatMessage]()
    for item in items:
        match item:
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                messages.append(ChatMessage(role, text_of(item.content)))
            case CallItem():
                call = ToolCall(item.call_id, item.name, item.arguments)
                last = messages[-1] if messages and messages[-1].role == "assistant" else None
                if last is not None:
                    messages[-1] = ChatMessage("assistant", last.content, (*last.tool_calls, call))
                else:
                    messages.append(ChatMessage("assistant", "", (call,)))
            case CallOutputItem():
                messages.append(ChatMessage("tool", text_of(item.output), tool_call_id=item.call_id))
    return messages
