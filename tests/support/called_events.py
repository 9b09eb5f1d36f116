"""Reads what comes by calls of a coroutine's callbacks as one iteration, in order."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from penstock.services.background import end

_NOTHING = object()


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
