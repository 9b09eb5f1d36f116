"""Chunks made from a template are the chunks that the format describes."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from router_service.answer_batching import AnswerBatching
from router_service.openai_gateway import replies
from router_service.openai_gateway.replies import ChatFormat, Choice, CompletionFormat, Format
from router_service.openai_gateway.streamed_replies import StreamedReply
from services.domain import TokenFrame

TEXTS = (
    'plain "quoted" \\ back',
    "\0\n\r\t\x1f",
    "ßπ 漢字 😀",
    "\u2028</script>",
    "\ud83d",
    "data: [DONE]\n\n",
    "\\u0000",
)
MODELS = ("only", '"\\u0000"', "\0", 'x"},"y":"')


class Waiting(AnswerBatching):
    """Has what it is given called when the test says so."""

    def __init__(self, *, waits: bool) -> None:
        self._waits, self.sends = waits, list[Callable[[], None]]()

    def waits(self) -> bool:
        return self._waits

    def add(self, send: Callable[[], None]) -> None:
        self.sends.append(send)


def parsed(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert b"\n" not in event[:-2]
    return json.loads(event[6:])


@pytest.mark.parametrize("shape", [ChatFormat(), CompletionFormat()])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("usage", [False, True])
def test_a_chunk_is_what_json_would_give_whatever_is_in_texts_and_names(shape: Format, model: str, usage: bool) -> None:
    sent: list[bytes] = []
    base = replies.envelope(shape, "req-1", model, chunk=True)
    choices = [Choice(0), Choice(1)]
    reply = StreamedReply(shape, base, choices, sent.append, Waiting(waits=False), dict, logprobs=False, usage=usage)
    for at, text in enumerate(TEXTS):
        reply.answer(at % 2, "tier", TokenFrame(at, (at,), text))
    reply.answer(0, "tier", TokenFrame(9, (9,), ""))
    chunks = [parsed(event) for event in sent]
    openings = [shape.opening(index) for index in (0, 1)]
    expected = [{"choices": [opening]} for opening in openings if opening is not None]
    expected += [
        {"choices": [shape.delta(at % 2, TokenFrame(at, (at,), text), 0, logprobs=False)]}
        for at, text in enumerate(TEXTS)
    ]
    assert chunks == [base | ({"usage": None} if usage else {}) | more for more in expected]


def test_parts_that_may_wait_are_joined_the_first_never_waits_and_the_end_waits_for_none() -> None:
    """Each choice's own parts, in order; an error comes behind what came before it."""
    sent: list[bytes] = []
    waiting = Waiting(waits=True)
    shape = ChatFormat()
    choices = [Choice(0), Choice(1)]
    reply = StreamedReply(shape, {}, choices, sent.append, waiting, dict, logprobs=False, usage=False)

    def texts() -> list[tuple[int, str]]:
        found = [choice for event in sent for choice in parsed(event).get("choices", [])]
        sent.clear()
        return [(choice["index"], choice["delta"]["content"]) for choice in found]

    reply.answer(0, "t", TokenFrame(0, (0,), "a"))
    assert texts() == [(0, ""), (1, ""), (0, "a")]
    reply.answer(1, "t", TokenFrame(0, (0,), "w"))
    assert texts() == [(1, "w")], "nor does that of another choice"
    for at, (index, text) in enumerate(((0, "b"), (1, "x"), (0, "c"), (1, "y"))):
        reply.answer(index, "t", TokenFrame(at, (at,), text))
    assert not sent
    assert len(waiting.sends) == 1, "all choices of a reply wait together"
    waiting.sends.pop()()
    assert texts() == [(0, "bc"), (1, "xy")]
    reply.answer(1, "t", TokenFrame(9, (9,), "z"))
    reply.error({"error": "gone"})
    assert parsed(sent.pop()) == {"error": "gone"}
    assert texts() == [(1, "z")]
    waiting.sends.pop()()
    assert not sent
