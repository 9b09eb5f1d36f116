"""Reads as one iteration what comes by calls, in order: tokens with events that are iterated, or all of a coroutine."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from penstock.services.background import end

_NOTHING = object()
_Event = TypeVar("_Event")
_Token = TypeVar("_Token")


async def iterated(
    start: Callable[[Callable[[_Token], None]], AsyncGenerator[_Event, None]],
) -> AsyncGenerator[_Event | _Token, None]:
    """What `start` gives, and what it hands to its argument. Leaving the iteration closes it."""
    events: asyncio.Queue[_Event | _Token | None] = asyncio.Queue()

    async def read() -> None:
        async with aclosing(start(events.put_nowait)) as source:
            async for event in source:
                events.put_nowait(event)

    task = asyncio.create_task(read())
    task.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        task.result()
    finally:
        await end(task)


async def called(start: Callable[[Callable[[Any], None]], Coroutine[Any, Any, Any]]) -> AsyncGenerator[Any, None]:
    """What `start` passes to its argument, then its result. Leaving the iteration cancels it."""
    events: asyncio.Queue[Any] = asyncio.Queue()
    task = asyncio.create_task(start(events.put_nowait))
    task.add_done_callback(lambda _: events.put_nowait(_NOTHING))
    try:
        while (event := await events.get()) is not _NOTHING:
            yield event
        yield task.result()
    finally:
        await end(task)
