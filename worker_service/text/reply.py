"""The text of a reply: incremental decoding and stop strings. No I/O.

The text emitted after n tokens depends only on those tokens. So a reply that continues on another instance, which is given
the tokens so far, continues with the next character.
"""

from collections.abc import Sequence as Seq

from worker_service.text.tokenizer import Tokenizer


class ReplyText:
    """Decodes a reply and detects stop strings. `stopped_by`: the one that ended it."""

    def __init__(self, tokenizer: Tokenizer, stop: Seq[str] = (), stop_token_ids: Seq[int] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
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
        return self._emit(self._stream.step(token_id))

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
        text = self._held + text
        matches = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            at, _, self.stopped_by = min(matches)
            self.stopped = True
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
