"""The text of a reply: incremental decoding and stop strings. No I/O.

The text emitted after n tokens depends only on those tokens. So a reply that continues on another instance, which is given
the tokens so far, continues with the next character.
"""

import functools
from collections.abc import Sequence as Seq

from penstock.services.borders import borders
from penstock.worker_service.text.tokenizer import Tokenizer


class ReplyText:
    """Decodes a reply and detects stop strings. `stopped_by`: the one that ended it."""

    def __init__(self, tokenizer: Tokenizer, stop: Seq[str] = (), stop_token_ids: Seq[int] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, [StopString(text) for text in stop]
        self._stop_tokens = frozenset(stop_token_ids)
        self._stream = tokenizer.stream()
        self._token_ids: list[int] = []
        self._decoded = 0  # characters decoded by the stream
        self._held = ""  # text that may begin a stop string
        self.stopped_by: str | None = None
        self.stopped = False
        """Whether a stop string or a stop token has ended the reply."""

    def push(self, token_id: int) -> str:
        """The text that is final with this token; empty after a stop string, and of a stop token."""
        if self.stopped:
            return ""
        if token_id in self._stop_tokens:
            self.stopped = True
            return ""
        self._token_ids.append(token_id)
        return self._emit(self._stream(token_id))

    def finish(self) -> str:
        """The text held back until the end of the reply, with incomplete characters as U+FFFD."""
        if self.stopped_by is not None:
            return ""
        full_text = self._tokenizer.decode(self._token_ids)
        text = self._emit(full_text[self._decoded :])
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _emit(self, text: str) -> str:
        self._decoded += len(text)
        if not self._stop:
            return text
        piece, held = text, len(self._held)
        text = self._held + piece
        matches = [
            (held + end - len(stop.text), -len(stop.text), stop.text)
            for stop in self._stop
            if (end := stop.end_in(piece)) is not None
        ]
        if matches:
            at, _, self.stopped_by = min(matches)
            self.stopped = True
            self._held = ""
            return text[:at]
        keep = max(stop.begun for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class StopString:
    """Looks for a stop string in text that comes in pieces, in constant time per character (Knuth, Morris and Pratt, 1977).

    begun: length of the longest end of the text so far that the stop string begins with.
    """

    def __init__(self, text: str) -> None:
        self.text, self.begun = text, 0
        self._shorter = _borders(text)

    def end_in(self, piece: str) -> int | None:
        """Where in the next piece the first occurrence ends; None without one. Nothing is looked for after it."""
        if not self.begun and self.text[0] not in piece:
            return None
        for i, character in enumerate(piece):
            while self.begun and self.text[self.begun] != character:
                self.begun = self._shorter[self.begun - 1]
            if self.text[self.begun] == character:
                self.begun += 1
                if self.begun == len(self.text):
                    return i + 1
        return None


_borders = functools.lru_cache(maxsize=1024)(borders)
