"""Parts of answers wait for each other only in a busy router, and never for long; what a chunk holds."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from penstock.router_service.answer_batching import (
    BUSY_SHARE,
    IDLE_SHARE,
    MAX_WAIT_S,
    MEASURE_S,
    AnswerBatching,
    wait_s,
)
from penstock.router_service.openai_gateway import replies
from penstock.router_service.openai_gateway.replies import ChatFormat, Choice, CompletionFormat, Format
from penstock.router_service.openai_gateway.streamed_replies import StreamedReply
from penstock.types.replies import TokenFrame


class Cpu:
    """CPU time of an event loop that is so busy."""

    def __init__(self, busy: float) -> None:
        self.busy, self._loop = busy, asyncio.get_running_loop()
        self._began_s, self._spent_s = self._loop.time(), 0.0

    def __call__(self) -> float:
        return self._spent_s + self.busy * (self._loop.time() - self._began_s)

    def rest(self) -> None:
        """Be idle from now on."""
        self._spent_s, self.busy = self(), 0.0


def fault() -> None:
    raise LookupError("of this answer alone")


def test_the_wait_grows_with_the_load_up_to_a_bound() -> None:
    waits = [wait_s(share / 100) for share in range(0, 131)]
    assert waits == sorted(waits)
    assert wait_s(IDLE_SHARE) == 0
    assert wait_s((IDLE_SHARE + BUSY_SHARE) / 2) > 0
    assert wait_s(BUSY_SHARE) == waits[-1] == MAX_WAIT_S


async def test_nothing_waits_in_a_router_that_has_time() -> None:
    batching, loop = AnswerBatching(Cpu(IDLE_SHARE / 2)), asyncio.get_running_loop()
    began_s = loop.time()
    while loop.time() < began_s + 2 * MEASURE_S:  # it measures its load now and then
        assert not batching.waits()
        await asyncio.sleep(0)


async def test_in_a_busy_router_all_parts_leave_together_in_order_and_nothing_waits_once_it_has_time() -> None:
    sent, cpu = list[int](), Cpu(1.0)
    batching, left = AnswerBatching(cpu), asyncio.Event()
    async with asyncio.timeout(60):
        while not batching.waits():
            await asyncio.sleep(0)
        for number in range(10):
            batching.add(partial(sent.append, number))
            batching.add(fault)
        batching.add(left.set)
        assert not sent
        await left.wait()
        assert sent == list(range(10))
        cpu.rest()
        while batching.waits():
            await asyncio.sleep(0)


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
