"""Heartbeats between the events of a stream, so that its reader can tell waiting from a router that is stuck."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

from router_service.domain.events import Heartbeat, RouterEvent
from services.background import end

_EVENTS_AHEAD = 8  # events that are made while the reader has not yet taken the ones before


async def with_heartbeats(
    events: AsyncGenerator[RouterEvent, None], interval_s: float
) -> AsyncGenerator[RouterEvent | Heartbeat, None]:
    """Pass events on as they come, and a Heartbeat after each `interval_s` without one.

    The events are read in a task of their own: that they are waited for must not end when a heartbeat is sent. An event costs
    no timer: each stream has one, which is set again when it goes off. Leaving the iteration closes `events` before it
    returns. Raises what `events` raises, after the events that came before it.
    """
    loop, relay = asyncio.get_running_loop(), _Relay(events)
    task = asyncio.create_task(relay.read(), name="events of a stream")
    task.add_done_callback(lambda _: relay.news.set())
    last_s = loop.time()
    timer = loop.call_at(last_s + interval_s, relay.timer_went_off)
    try:
        while True:
            while relay.events:
                event = relay.events.popleft()
                relay.room.set()
                yield event
                last_s = loop.time()
            if task.done():
                task.result()
                return
            if relay.timer_is_off:
                if loop.time() >= last_s + interval_s:
                    yield Heartbeat(interval_s)
                    last_s = loop.time()
                relay.timer_is_off = False
                timer = loop.call_at(last_s + interval_s, relay.timer_went_off)
            relay.news.clear()
            if not relay.events and not task.done():
                await relay.news.wait()
    finally:
        timer.cancel()
        await end(task)
        if not task.cancelled():
            task.exception()  # of a reader that has left: nobody else asks for it


class _Relay:
    """Reads events ahead, up to a bound."""

    def __init__(self, source: AsyncGenerator[RouterEvent, None]) -> None:
        self._source = source
        self.events: deque[RouterEvent] = deque()
        self.news, self.room = asyncio.Event(), asyncio.Event()
        self.timer_is_off = False

    def timer_went_off(self) -> None:
        self.timer_is_off = True
        self.news.set()

    async def read(self) -> None:
        async with aclosing(self._source) as source:
            async for event in source:
                self.events.append(event)
                self.news.set()
                while len(self.events) >= _EVENTS_AHEAD:
                    self.room.clear()
                    await self.room.wait()
