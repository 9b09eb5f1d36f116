"""Tools that a model may call, and its calls."""

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from penstock.types.limits import AtMost
from penstock.types.problems import FieldProblem, length_problems, shortened
from penstock.types.structured import json_text, json_value, schema_problems

MAX_TOOLS = 128  # as at OpenAI
MAX_TOOLS_CHARS = 524_288
"""Of all tools together: names, descriptions and schemas."""
MAX_TOOL_CALLS = 128  # of one message
MAX_CALL_ID_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

ANY_OBJECT = '{"type":"object"}'
"""The parameters of a tool that states none."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    parameters: JSON schema of its arguments, as text; it may be given as a mapping.
    strict: calls must fit the schema, also where the model decides by itself whether to call.
    """

    name: str
    description: str = ""
    parameters: str = ANY_OBJECT
    strict: bool = False

    if TYPE_CHECKING:

        def __init__(
            self,
            name: str,
            description: str = "",
            parameters: str | Mapping[str, Any] = ANY_OBJECT,
            strict: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        schema: str | Mapping[str, Any] = self.parameters
        if isinstance(schema, Mapping):
            object.__setattr__(self, "parameters", json_text(schema))

    @property
    def characters(self) -> int:
        return len(self.name) + len(self.description) + len(self.parameters)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model has made. arguments: a JSON object as text, as the model wrote it."""

    id: str
    name: str
    arguments: str


class ToolMode(enum.StrEnum):
    """AUTO: the model decides. NONE: no tool is offered. REQUIRED: it calls at least one."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether and what the model calls.

    function: the one tool that it must call; then the mode is REQUIRED.
    parallel: several calls in one reply are allowed.
    """

    mode: ToolMode = ToolMode.AUTO
    function: str = ""
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request."""

    tools: Annotated[tuple[Tool, ...], AtMost(MAX_TOOLS, "tools")] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)

    @property
    def offered(self) -> tuple[Tool, ...]:
        """What the model sees: nothing where it may not call."""
        return () if self.choice.mode is ToolMode.NONE else self.tools

    @property
    def callable(self) -> tuple[Tool, ...]:
        """What it may call: of all tools, the one that is named where one is."""
        return tuple(tool for tool in self.offered if self.choice.function in ("", tool.name))

    @property
    def characters(self) -> int:
        return sum(tool.characters for tool in self.offered)

    def problems(self, path: str) -> Iterator[FieldProblem]:
        """What is wrong with the tools of a prompt. Counts come first: what is too many is not walked."""
        tools = self.tools
        if len(tools) > MAX_TOOLS:
            yield FieldProblem(f"{path}.tools", f"at most {MAX_TOOLS} tools, not {len(tools)}")
            return
        if sum(tool.characters for tool in tools) > MAX_TOOLS_CHARS:
            yield FieldProblem(f"{path}.tools", f"longer than {MAX_TOOLS_CHARS} characters")
            return
        seen = set[str]()
        for i, tool in enumerate(tools):
            if not _NAME.fullmatch(tool.name):
                yield FieldProblem(f"{path}.tools[{i}].name", "must have 1 to 64 of A-Z, a-z, 0-9, '_', '-' and '.'")
            elif tool.name in seen:
                yield FieldProblem(f"{path}.tools[{i}].name", f"'{tool.name}' is there twice")
            seen.add(tool.name)
            yield from schema_problems(tool.parameters, f"{path}.tools[{i}].parameters")
        choice = self.choice
        if choice.function and choice.mode is not ToolMode.REQUIRED:
            yield FieldProblem(f"{path}.choice.mode", "must be required where a function is named")
        elif choice.function and choice.function not in seen:
            yield FieldProblem(f"{path}.choice.function", f"no tool is called '{shortened(choice.function)}'")
        elif choice.mode is ToolMode.REQUIRED and not tools:
            yield FieldProblem(f"{path}.choice", "a call is required, but there are no tools")


NO_TOOLS = ToolUse()


def call_problems(calls: Sequence[ToolCall], path: str) -> Iterator[FieldProblem]:
    """What is wrong with the calls of an assistant's message."""
    if len(calls) > MAX_TOOL_CALLS:
        yield FieldProblem(path, f"at most {MAX_TOOL_CALLS} calls, not {len(calls)}")
        return
    for i, call in enumerate(calls):
        if not _NAME.fullmatch(call.name):
            yield FieldProblem(f"{path}[{i}].name", "must have 1 to 64 of A-Z, a-z, 0-9, '_', '-' and '.'")
        yield from length_problems(call.id, MAX_CALL_ID_CHARS, f"{path}[{i}].id")
        if arguments_object(call.arguments) is None:
            yield FieldProblem(f"{path}[{i}].arguments", "must be a JSON object as text")


def arguments_object(text: str) -> dict[str, Any] | None:
    """The object that a call's arguments are; None where they are none. No arguments at all are an empty object."""
    if not text.strip():
        return {}
    try:
        value = json_value(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
