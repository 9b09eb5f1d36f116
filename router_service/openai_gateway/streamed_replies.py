"""A reply as server-sent events: the text of each choice in chunks from a template, everything else as JSON."""

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from json.encoder import encode_basestring_ascii
from typing import Any

from penstock.router_service.answer_batching import AnswerBatching
from penstock.router_service.domain.events import RouterEvent
from penstock.router_service.openai_gateway import replies
from penstock.router_service.openai_gateway.replies import Choice, Format, Json
from penstock.router_service.openai_gateway.tools import ToolDeltas
from penstock.types.events import Finished
from penstock.types.replies import FinishReason, TokenFrame

_PLACE = json.dumps("\0")


class StreamedReply:
    """Converts the events of all choices to those of the stream.

    send: called with each complete event of the stream. extension: the field `penstock` of the last chunk.
    """

    def __init__(
        self,
        shape: Format,
        base: Json,
        choices: Seq[Choice],
        send: Callable[[bytes], None],
        batching: AnswerBatching,
        extension: Callable[[], Any],
        *,
        logprobs: bool,
        usage: bool,
        tools: Callable[[int, str], ToolDeltas | None] | None = None,
    ) -> None:
        """tools: where the model may call some, what separates the calls of a choice's reply by a tier. The output of a tier
        whose format of calls is unknown is passed on as text."""
        self._shape, self._choices, self._send, self._extension = shape, choices, send, extension
        self._batching = batching
        self._base = base | {"usage": None} if usage else base
        self._logprobs, self._usage, self._tools = logprobs, usage, tools
        self._calling: list[ToolDeltas | None] = [None] * len(choices)
        self._templates = [self._template(choice.index) for choice in choices]
        self._characters = [0] * len(choices)
        self._texts = [""] * len(choices)  # of parts that wait for others
        self._begun = [False] * len(choices)  # whether their first tokens, which do not wait, have been sent
        self._waiting = self._opened = False
        self._closing = b""  # the chunk that closes the last choice: sent with the end of the stream

    def answer(self, index: int, tier: str, frame: TokenFrame) -> None:
        """The next part of a choice's answer, of any tier."""
        self._open_once()
        if self._tools is not None and (deltas := self._calling[index] or self._tools(index, tier)) is not None:
            self._calling[index] = deltas
            self._pieces(index, deltas.push(frame.text), frame if self._logprobs else None)
            return
        if not self._logprobs:
            if not self._begun[index] or not (self._waiting or self._batching.waits()):
                self._begun[index] = True
                self._send_text(index, frame.text)
                return
            self._texts[index] += frame.text
            if not self._waiting:
                self._waiting = True
                self._batching.add(self._send_texts)
            return
        delta = self._shape.delta(index, frame, self._characters[index], logprobs=True)
        self._characters[index] += len(frame.text)
        self._json(self._base | {"choices": [delta]})

    def reasoning(self, index: int, text: str) -> None:
        """The next part of a choice's reasoning, before its answer."""
        self._open_once()
        self._json(self._base | {"choices": [replies.chat_choice(index, {"reasoning_content": text})]})

    def event(self, index: int, event: RouterEvent) -> None:
        """Any other event of a choice."""
        if not isinstance(event, Finished):
            return
        if (deltas := self._calling[index]) is not None:
            self._pieces(index, deltas.finish(), None)
        choice = self._choices[index]
        choice.event(event)
        if event.reason is FinishReason.DECLINED:  # an error, once all choices have ended
            return
        self._open_once()
        if self._waiting:
            self._send_texts()
        last = all(c.finished is not None for c in self._choices)
        extra = {"penstock": self._extension()} if last and not self._usage else {}
        closing = _data(self._base | {"choices": [self._shape.closing(choice)]} | extra).encode()
        if last:
            self._closing = closing
        else:
            self._send(closing)

    def end(self) -> bytes:
        """All choices are complete. Returns the end of the stream, which is written at once."""
        end, self._closing = self._closing, b""
        if self._usage:
            extra = {"penstock": self._extension()}
            end += _data(self._base | {"choices": [], "usage": replies.usage(self._choices)} | extra).encode()
        return end + b"data: [DONE]\n\n"

    def error(self, body: Json) -> None:
        """The reply ends with an error."""
        self._send_texts()
        if self._closing:
            self._send(self._closing)
        self._json(body)

    def _pieces(self, index: int, pieces: list[Json], frame: TokenFrame | None) -> None:
        for delta in replies.tool_deltas(index, pieces, frame):
            self._json(self._base | {"choices": [delta]})

    def _send_texts(self) -> None:
        self._waiting = False
        for index, text in enumerate(self._texts):
            self._texts[index] = ""
            self._send_text(index, text)

    def _send_text(self, index: int, text: str) -> None:
        if text:
            before, after = self._templates[index]
            self._send(f"{before}{encode_basestring_ascii(text)}{after}".encode())

    def _open_once(self) -> None:
        """Send the first chunks of the choices, before anything else."""
        if self._opened:
            return
        self._opened = True
        for choice in self._choices:
            if (opening := self._shape.opening(choice.index)) is not None:
                self._json(self._base | {"choices": [opening]})

    def _template(self, index: int) -> tuple[str, str]:
        """The chunk before and after the JSON string of a piece of text; the second part contains nothing of the client's."""
        delta = self._shape.delta(index, TokenFrame(0, (), "\0"), 0, logprobs=False)
        before, _, after = _data(self._base | {"choices": [delta]}).rpartition(_PLACE)
        return before, after

    def _json(self, chunk: Json) -> None:
        self._send(_data(chunk).encode())


def _data(chunk: Json) -> str:
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"
