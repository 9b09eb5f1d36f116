"""Gathers single tokens into frames: the first at once, later ones for at most a moment or a number of tokens."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from services.background import end
from services.domain.requests import TokenFrame
from worker_service.engine.interface import EngineEvent, Finished, HandedOver


@dataclass(frozen=True, slots=True)
class CoalescingLimits:
    """interval_s, tokens: bounds of one frame. heartbeat_s: silence after which None is yielded."""

    interval_s: float
    tokens: int
    heartbeat_s: float


async def coalesced(
    events: AsyncGenerator[EngineEvent, None], limits: CoalescingLimits
) -> AsyncGenerator[EngineEvent | None, None]:
    """The same events, consecutive tokens joined; None now and then while there is nothing to say.

    A token waits for at most `interval_s`. Leaving the iteration leaves `events`.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[EngineEvent | BaseException] = asyncio.Queue()

    async def pump() -> None:
        try:
            async with aclosing(events) as source:
                async for event in source:
                    queue.put_nowait(event)
        except Exception as error:
            queue.put_nowait(error)

    task = asyncio.create_task(pump())
    sent_at = -limits.interval_s
    try:
        while True:
            try:
                async with asyncio.timeout(limits.heartbeat_s):
                    event = await queue.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, TokenFrame):
                gathered, count = [event], len(event.token_ids)
                after: EngineEvent | BaseException | None = None
                due = sent_at + limits.interval_s if event.offset > 0 else sent_at
                while count < limits.tokens:
                    if not queue.empty():
                        after = queue.get_nowait()
                    elif loop.time() >= due:
                        break
                    else:
                        try:
                            async with asyncio.timeout_at(due):
                                after = await queue.get()
                        except TimeoutError:
                            break
                    if not isinstance(after, TokenFrame):  # the end need not wait
                        break
                    gathered.append(after)
                    count += len(after.token_ids)
                    after = None
                sent_at = loop.time()
                yield TokenFrame.joined(gathered)
                if after is None:
                    continue
                event = after
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, (Finished, HandedOver)):
                return
    finally:
        await end(task)
