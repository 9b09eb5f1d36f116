"""The interface of tokenizers."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from penstock.services.domain.errors import PromptTooLong, invalid, unsupported
from penstock.services.reasoning import ReasoningFormat
from penstock.services.tool_calls.formats import HERMES, ToolFormat
from penstock.services.tool_calls.rendering import calls_text
from penstock.types.problems import FieldProblem
from penstock.types.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from penstock.types.tools import ToolUse
from penstock.worker_service.text.decoding import byte_level_stream

TokenStream = Callable[[int], str]
"""Decodes one reply token by token: the text that is final with a token. It depends only on the tokens so far."""


class Tokenizer(Protocol):
    vocab_size: int
    eos_ids: frozenset[int]
    digest: str
    """Equal for tokenizers that encode and decode alike; at most 128 characters."""
    characters_per_token: int | None
    """Largest number of characters that one token can represent; None if there is no bound."""
    tool_format: ToolFormat | None
    """How the model writes tool calls; None where its chat template takes no tools."""
    reasoning_format: ReasoningFormat | None
    """How the model marks its reasoning; None where its chat template has no such marks."""

    def encode(self, prompt: Prompt, context_tokens: int | None = None) -> list[int]:
        """The token ids of a prompt. Thread-safe.

        Raises:
            InvalidRequest: The model cannot process it (no chat template, unknown ids).
            PromptTooLong: It has `context_tokens` tokens or more. A prompt that is too long by its characters is not
            tokenized.
        """
        ...

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a piece of a reply: no special tokens are added or read."""
        ...

    def stream(self) -> TokenStream: ...

    def decode(self, token_ids: Seq[int]) -> str:
        """The text of a complete reply, without special tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be incomplete UTF-8. None for a special token, which has no text."""
        ...


def check_characters(tokenizer: Tokenizer, characters: int, context_tokens: int | None) -> None:
    """Refuse a text that cannot fit into the context, regardless of its tokens.

    Raises:
        PromptTooLong: It cannot fit.
    """
    max_characters = tokenizer.characters_per_token
    if context_tokens is not None and max_characters is not None and characters > (context_tokens - 1) * max_characters:
        problem = f"{characters} characters leave no room for a reply in a context of {context_tokens} tokens"
        raise PromptTooLong(FieldProblem("prompt", f"{problem}, of at most {max_characters} characters each"))


def check_tokens(tokens: int, context_tokens: int | None) -> None:
    """Refuse a prompt with too many tokens.

    Raises:
        PromptTooLong: It leaves no room for a reply.
    """
    if context_tokens is not None and tokens >= context_tokens:
        raise PromptTooLong.by("prompt", tokens, context_tokens)


def checked_ids(prompt: TokenPrompt, vocab_size: int, context_tokens: int | None) -> list[int]:
    """The ids of a prompt that is not tokenized. Raises as `Tokenizer.encode`."""
    check_tokens(len(prompt.token_ids), context_tokens)
    if max(prompt.token_ids) >= vocab_size:
        raise invalid("prompt.token_ids.ids", f"this model's token ids end at {vocab_size - 1}")
    return list(prompt.token_ids)


class ByteTokenizer:
    """One token per byte, and one for the end of a reply; used by the simulated engine."""

    END = 256
    vocab_size = 257
    digest = "bytes"
    eos_ids = frozenset({END})
    characters_per_token: int | None = 1
    tool_format: ToolFormat | None = HERMES
    reasoning_format: ReasoningFormat | None = None

    def encode(self, prompt: Prompt, context_tokens: int | None = None) -> list[int]:
        match prompt:
            case TokenPrompt():
                return checked_ids(prompt, self.vocab_size, context_tokens)
            case TextPrompt(text):
                pass
            case ChatPrompt(messages, tool_use):
                if prompt.wants_reasoning:
                    field = "reasoning_effort" if prompt.thinking is None else "thinking"
                    raise unsupported(f"prompt.chat.{field}", "this model does not reason")
                text = _tools_text(tool_use) + "".join(map(_message_text, messages)) + "assistant: "
        check_characters(self, len(text), context_tokens)
        encoded = text.encode("utf-8", "replace")
        check_tokens(len(encoded), context_tokens)
        return list(encoded)

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def stream(self) -> TokenStream:
        return byte_level_stream(self.token_bytes)

    def decode(self, token_ids: Seq[int]) -> str:
        return bytes(t for t in token_ids if t != self.END).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id != self.END else b""


def _tools_text(tool_use: ToolUse) -> str:
    listed = "".join(f"{tool.name}: {tool.description} {tool.parameters}\n" for tool in tool_use.offered)
    return f"tools:\n{listed}" if listed else ""


def _message_text(message: ChatMessage) -> str:
    return f"{message.role}: {message.content}{calls_text(message.tool_calls)}\n"
