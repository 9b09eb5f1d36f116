"""Prompts: chats, text and token ids, and their limits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from penstock.types.limits import AtMost
from penstock.types.problems import FieldProblem, length_problems, shortened
from penstock.types.tools import MAX_CALL_ID_CHARS, MAX_TOOL_CALLS, NO_TOOLS, ToolCall, ToolUse, call_problems
from penstock.types.values import value_type

MAX_PROMPT_CHARS = 2_000_000
MAX_PROMPT_TOKENS = 1_000_000
MAX_MESSAGES = 4_096
MAX_TOKEN_ID = 2**31 - 1
MAX_EFFORT_CHARS = 32
TokenIds = Annotated[tuple[int, ...], AtMost(MAX_PROMPT_TOKENS, "tokens")]
ROLES = ("system", "user", "assistant", "tool")
NO_EFFORT = "none"
"""The reasoning effort of a model that does not reason."""


@value_type(frozen=True, slots=True)
class ChatMessage:
    """One message. tool_calls: of the assistant. tool_call_id: the call that a message of role `tool` answers."""

    role: str
    content: str
    tool_calls: Annotated[tuple[ToolCall, ...], AtMost(MAX_TOOL_CALLS, "calls")] = ()
    tool_call_id: str = ""

    @property
    def characters(self) -> int:
        if not self.tool_calls:
            return len(self.content)
        return len(self.content) + sum(len(call.name) + len(call.arguments) for call in self.tool_calls)


@value_type(frozen=True, slots=True)
class ChatPrompt:
    """A chat, rendered by the chat template of the model.

    thinking: whether the model reasons before it answers; None: its default. reasoning_effort: how much, in the words of its
        template; empty: its default.
    """

    messages: Annotated[tuple[ChatMessage, ...], AtMost(MAX_MESSAGES, "messages")]
    tool_use: ToolUse = NO_TOOLS
    thinking: bool | None = None
    reasoning_effort: str = ""

    @property
    def wants_reasoning(self) -> bool | None:
        """Whether the model shall reason; None if the request does not say."""
        if self.thinking is not None or not self.reasoning_effort:
            return self.thinking
        return self.reasoning_effort != NO_EFFORT

    @property
    def characters(self) -> int:
        """Of everything that is rendered."""
        characters = sum(message.characters for message in self.messages)
        return characters if self.tool_use is NO_TOOLS else characters + self.tool_use.characters


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Continued without a chat template."""

    text: str

    @property
    def characters(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Continued without a chat template, and not tokenized."""

    characters: ClassVar[int] = 0

    token_ids: TokenIds


Prompt = ChatPrompt | TextPrompt | TokenPrompt


def prompt_problems(prompt: Prompt, path: str) -> Iterator[FieldProblem]:
    """The problems of a prompt. Counts are checked first, so that oversized lists are not iterated."""
    match prompt:
        case ChatPrompt(messages, tool_use, thinking, effort):
            if not messages:
                yield FieldProblem(f"{path}.chat.messages", "at least one message is needed")
            if len(messages) > MAX_MESSAGES:
                problem = f"at most {MAX_MESSAGES} messages, not {len(messages)}"
                yield FieldProblem(f"{path}.chat.messages", problem)
                return
            for i, message in enumerate(messages):
                yield from _message_problems(message, f"{path}.chat.messages[{i}]")
            if sum(m.characters for m in messages) > MAX_PROMPT_CHARS:
                yield FieldProblem(f"{path}.chat.messages", f"longer than {MAX_PROMPT_CHARS} characters")
            if tool_use is not NO_TOOLS:
                yield from tool_use.problems(f"{path}.chat.tool_use")
            if effort:
                yield from _reasoning_problems(thinking, effort, f"{path}.chat")
        case TextPrompt(text):
            if not text:
                yield FieldProblem(f"{path}.text", "must not be empty")
            yield from length_problems(text, MAX_PROMPT_CHARS, f"{path}.text")
        case TokenPrompt(token_ids):
            if not token_ids:
                yield FieldProblem(f"{path}.token_ids.ids", "must not be empty")
            yield from token_id_problems(token_ids, f"{path}.token_ids.ids")


def _reasoning_problems(thinking: bool | None, effort: str, path: str) -> Iterator[FieldProblem]:
    if not (len(effort) <= MAX_EFFORT_CHARS and effort.isidentifier()):
        yield FieldProblem(f"{path}.reasoning_effort", f"must be a word of at most {MAX_EFFORT_CHARS} characters")
    elif thinking is not None and thinking is (effort == NO_EFFORT):
        yield FieldProblem(f"{path}.reasoning_effort", "contradicts `thinking`")


def _message_problems(message: ChatMessage, path: str) -> Iterator[FieldProblem]:
    if message.role not in ROLES:
        yield FieldProblem(f"{path}.role", f"must be one of {', '.join(ROLES)}, not '{shortened(message.role)}'")
    if message.tool_calls:
        if message.role != "assistant":
            yield FieldProblem(f"{path}.tool_calls", "only the assistant calls tools")
        yield from call_problems(message.tool_calls, f"{path}.tool_calls")
    if message.tool_call_id:
        if message.role != "tool":
            yield FieldProblem(f"{path}.tool_call_id", "only a message of role tool answers a call")
        yield from length_problems(message.tool_call_id, MAX_CALL_ID_CHARS, f"{path}.tool_call_id")


def token_id_problems(token_ids: Sequence[int], path: str) -> Iterator[FieldProblem]:
    """The problems of a list of token ids, which may be empty."""
    if len(token_ids) > MAX_PROMPT_TOKENS:
        yield FieldProblem(path, f"at most {MAX_PROMPT_TOKENS} tokens, not {len(token_ids)}")
    elif token_ids and max(token_ids) > MAX_TOKEN_ID:
        yield FieldProblem(path, f"a token id must be at most {MAX_TOKEN_ID}")
