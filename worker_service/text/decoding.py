"""Decoding a reply token by token, so that the pieces join to the text of the whole. No I/O.

`tokenizers.decoders.DecodeStream` does not do this: it raises where a run of byte tokens is not UTF-8, and returns text
that a later token changes. So each kind of decoder has its own rule:

- ByteLevel: tokens are bytes, decoded as UTF-8 at the end. Only an incomplete character is uncertain.
- ByteFallback (Llama 2): a run of byte tokens is UTF-8 as a whole, or one U+FFFD per byte. A run is uncertain until it ends.
- Any other: a token's text is what it adds to the text of the tokens before it.
"""

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteLevelStream:
    """For a ByteLevel decoder. `bytes_of`: a token's bytes; none for a token that is no text."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of, self._decoder = bytes_of, codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))


class WindowStream:
    """For any other decoder: decodes the tokens whose text is new behind a few of those before.

    decode: the text of tokens, as `Tokenizer.decode`. is_skipped: whether a token is left out before decoding.
    open_ids: tokens whose text depends on the next one. lossy: the decoder joins bytes to characters, so that U+FFFD at the
    end may be a character whose other bytes are to come.
    """

    def __init__(
        self,
        decode: Callable[[Seq[int]], str],
        *,
        is_skipped: Callable[[int], bool],
        open_ids: Mapping[int, object],
        lossy: bool,
    ) -> None:
        self._decode, self._is_skipped, self._open_ids, self._lossy = decode, is_skipped, open_ids, lossy
        self._context: list[
            int
        ] = []  # already emitted; not empty text, so that the next token is not at the start of a text
        self._fresh: list[int] = []
        self._emitted = 0  # characters emitted of the text of context and fresh tokens together

    def step(self, token_id: int) -> str:
        if self._is_skipped(token_id):
            return ""
        self._fresh.append(token_id)
        if token_id in self._open_ids:
            return ""
        text = self._decode(self._context + self._fresh)
        if self._lossy and text.endswith(REPLACEMENT):
            new = text[self._emitted : -1]
            self._emitted += len(new)
            return new
        new = text[self._emitted :]
        for context in ([token_id], self._fresh, self._context + self._fresh):
            if emitted := len(self._decode(context)):
                self._context, self._fresh, self._emitted = context, [], emitted
                break
        return new


def decoder_kinds(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    """The types of a decoder of tokenizer.json, or of all that a sequence consists of."""
    if decoder and decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from decoder_kinds(part)
    elif decoder:
        yield decoder["type"]
