"""Reads events that come by iteration and tokens that come by call as one iteration, in order."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from penstock.services.background import end

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
