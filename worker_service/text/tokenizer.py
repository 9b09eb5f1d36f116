"""Tokenizers behind one small interface."""

import codecs
from collections.abc import Sequence as Seq
from typing import Protocol

from services.domain.errors import FieldProblem, PromptTooLong, invalid
from services.domain.requests import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from services.domain.tools import ToolUse
from services.tool_calls import HERMES, ToolFormat, calls_text


class TokenStream(Protocol):
    """Decodes one reply token by token."""

    def step(self, token_id: int) -> str:
        """Text that became certain with this token: a function of the tokens so far, nothing else."""
        ...


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def characters_per_token(self) -> int | None:
        """Most characters of a text that one token can stand for; None where there is no bound."""
        ...

    def encode(self, prompt: Prompt, context_tokens: int | None = None) -> list[int]:
        """Token ids of a prompt. Any number of threads may call it.

        Raises:
            InvalidRequest: the model cannot take it (no chat template, unknown ids).
            PromptTooLong: it has `context_tokens` tokens or more. Where its length alone says so, it is not tokenized.
        """
        ...

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None where its chat template takes no tools."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a piece of a reply: no special tokens are added or read."""
        ...

    def stream(self) -> TokenStream: ...

    def decode(self, token_ids: Seq[int]) -> str:
        """The text of a whole reply, special tokens left out."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes; alone they need not be valid UTF-8. None for a special token, which is no text."""
        ...


def check_characters(tokenizer: Tokenizer, characters: int, context_tokens: int | None) -> None:
    """Refuse a text that cannot fit the context, whatever its tokens are.

    Raises:
        PromptTooLong: it cannot.
    """
    most = tokenizer.characters_per_token
    if context_tokens is not None and most is not None and characters > (context_tokens - 1) * most:
        problem = f"{characters} characters leave no room for a reply in a context of {context_tokens} tokens"
        raise PromptTooLong(FieldProblem("prompt", f"{problem}, of at most {most} characters each"))


def check_tokens(tokens: int, context_tokens: int | None) -> None:
    """Refuse a prompt of too many tokens.

    Raises:
        PromptTooLong: it leaves no room for a reply.
    """
    if context_tokens is not None and tokens >= context_tokens:
        raise PromptTooLong.by("prompt", tokens, context_tokens)


class ByteTokenizer:
    """One token per byte, and one for the end of a reply: the simulated engine's."""

    END = 256
    vocab_size = 257
    eos_ids = frozenset({END})
    characters_per_token = 1
    tool_format = HERMES

    def encode(self, prompt: Prompt, context_tokens: int | None = None) -> list[int]:
        match prompt:
            case TokenPrompt(token_ids):
                check_tokens(len(token_ids), context_tokens)
                if max(token_ids) >= self.vocab_size:
                    raise invalid("prompt.token_ids.ids", f"this model's token ids end at {self.vocab_size - 1}")
                return list(token_ids)
            case TextPrompt(text):
                pass
            case ChatPrompt(messages, tool_use):
                text = _tools_text(tool_use) + "".join(map(_message_text, messages)) + "assistant: "
        check_characters(self, len(text), context_tokens)
        encoded = text.encode("utf-8", "replace")
        check_tokens(len(encoded), context_tokens)
        return list(encoded)

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def stream(self) -> "_ByteStream":
        return _ByteStream()

    def decode(self, token_ids: Seq[int]) -> str:
        return bytes(t for t in token_ids if t != self.END).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id != self.END else b""


def _tools_text(tool_use: ToolUse) -> str:
    listed = "".join(f"{tool.name}: {tool.description} {tool.parameters}\n" for tool in tool_use.offered)
    return f"tools:\n{listed}" if listed else ""


def _message_text(message: ChatMessage) -> str:
    return f"{message.role}: {message.content}{calls_text(message.tool_calls)}\n"


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        return "" if token_id == ByteTokenizer.END else self._decoder.decode(bytes([token_id]))
