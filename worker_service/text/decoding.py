"""Decodes a reply token by token, so that the pieces concatenate to the text of the complete reply. No I/O.

`tokenizers.decoders.DecodeStream` does not guarantee this: it raises if a run of byte tokens is not UTF-8, and returns text
that a later token changes. So each type of decoder has its own rule:

- ByteLevel: tokens are bytes, decoded as UTF-8 at the end. Only an incomplete character may change.
- ByteFallback (Llama 2): a run of byte tokens is UTF-8 as a whole, or one U+FFFD per byte. A run may change until it ends.
- Any other: the text of a token is the text that it adds to that of the previous tokens.
"""

import codecs
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_WINDOW_TOKENS, SHORT_WINDOW_TOKENS = 64, 8
"""A window of more tokens, none of which has a text of its own, is shortened: a reply of blanks would decode all its tokens
each time."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_stream(bytes_of: Callable[[int], bytes]) -> Callable[[int], str]:
    """For a ByteLevel decoder. `bytes_of`: a token's bytes; empty for a token without text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return lambda token_id: decoder.decode(bytes_of(token_id))


class WindowStream:
    """For any other decoder: decodes new tokens together with a few previous ones.

    decode: the text of tokens, like `Tokenizer.decode`. is_skipped: whether a token is removed before decoding.
    open_ids: tokens whose text depends on the next one. lossy: the decoder joins bytes to characters, so a U+FFFD at the end
    may become a character with the next bytes.
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
        self._context: list[int] = []  # already emitted; with text, so that the next token is not at the start
        self._fresh: list[int] = []
        self._emitted = 0  # characters emitted of the text of context and new tokens

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
        if len(self._context) > MAX_WINDOW_TOKENS:
            last = self._context[-SHORT_WINDOW_TOKENS:]
            if (part := self._decode(last)) and self._decode(self._context).endswith(part):
                self._context, self._emitted = last, len(part)
        return new
