"""Tokens that skip the reader's queue keep their place among the events."""

import asyncio

import pytest

from penstock.services.event_streams import EventStream
from penstock.types.replies import TokenFrame


def token(at: int) -> TokenFrame:
    return TokenFrame(at, (at,), "x")


async def settled(task: "asyncio.Task[object]") -> None:
    """Have the task run until it waits."""
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()


async def test_a_token_is_passed_on_at_once_while_the_reader_waits() -> None:
    seen: list[TokenFrame] = []
    stream = EventStream[str](seen.append)
    reading = asyncio.create_task(stream.get())
    await settled(reading)
    stream.put(token(0))
    assert seen == [token(0)]
    stream.put("event")
    assert await reading == "event"


async def test_a_token_behind_an_event_waits_until_the_reader_has_handled_the_event() -> None:
    """Also where the event has woken the reader, which has not run yet."""
    seen: list[object] = []
    stream = EventStream[str](seen.append)

    async def read() -> None:
        while True:
            seen.append(await stream.get())
            await asyncio.sleep(0)  # it handles the event
            seen.append("handled")

    reading = asyncio.create_task(read())
    await settled(reading)
    stream.put("a")
    stream.put(token(0))
    await asyncio.sleep(0)
    stream.put(token(1))
    stream.put("b")
    stream.put(token(2))
    await settled(reading)
    await settled(reading)
    assert seen == ["a", "handled", token(0), token(1), "b", "handled", token(2)]
    reading.cancel()


async def test_what_the_taker_raises_fails_this_stream_and_nobody_elses() -> None:
    """Where the token comes by call and where the reader finds it; what comes behind it is dropped."""

    def refuse(frame: TokenFrame) -> None:
        raise LookupError(f"token {frame.offset}")

    for waiting in (True, False):
        stream = EventStream[str](refuse)
        reading = asyncio.create_task(stream.get())
        if waiting:
            await settled(reading)
        stream.put(token(0))
        stream.put(token(1))
        stream.put("event")
        with pytest.raises(LookupError, match="token 0"):
            await reading


async def test_an_error_comes_behind_the_events_before_it_and_is_the_first() -> None:
    stream = EventStream[str]()
    stream.put("a")
    stream.put(token(0))
    stream.fail(LookupError("first"))
    stream.fail(LookupError("second"))
    stream.put("b")
    assert [await stream.get(), await stream.get()] == ["a", token(0)]
    with pytest.raises(LookupError, match="first"):
        await stream.get()


async def test_tokens_that_came_before_their_taker_are_given_to_it_in_order() -> None:
    seen: list[TokenFrame] = []
    stream = EventStream[str]()
    for at in range(3):
        stream.put(token(at))
    stream.pass_tokens(seen.append)
    stream.put(token(3))
    stream.put("end")
    assert await stream.get() == "end"
    assert seen == [token(at) for at in range(4)]
