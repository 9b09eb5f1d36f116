"""Tokenizers behind one small interface."""

import codecs
from collections.abc import Sequence as Seq
from typing import Protocol

from services.domain.errors import invalid
from services.domain.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt


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

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. InvalidRequest if the model cannot take it (no chat template, unknown ids)."""
        ...

    def stream(self) -> TokenStream: ...

    def decode(self, token_ids: Seq[int]) -> str:
        """The text of a whole reply, special tokens left out."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes; alone they need not be valid UTF-8. None for a special token, which is no text."""
        ...


class ByteTokenizer:
    """One token per byte, and one for the end of a reply: the simulated engine's."""

    END = 256
    vocab_size = 257
    eos_ids = frozenset({END})

    def encode(self, prompt: Prompt) -> list[int]:
        match prompt:
            case TokenPrompt(token_ids):
                if max(token_ids) >= self.vocab_size:
                    raise invalid("prompt.token_ids.ids", f"this model's token ids end at {self.vocab_size - 1}")
                return list(token_ids)
            case TextPrompt(text):
                return list(text.encode("utf-8", "replace"))
            case ChatPrompt(messages):
                rendered = "".join(f"{m.role}: {m.content}\n" for m in messages) + "assistant: "
                return list(rendered.encode("utf-8", "replace"))

    def stream(self) -> "_ByteStream":
        return _ByteStream()

    def decode(self, token_ids: Seq[int]) -> str:
        return bytes(t for t in token_ids if t != self.END).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id != self.END else b""


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        return "" if token_id == ByteTokenizer.END else self._decoder.decode(bytes([token_id]))
