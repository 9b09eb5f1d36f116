"""Heartbeats between the events of a stream, so that its reader can tell waiting from a router that is stuck."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from router_service.answer_batching import AnswerBatching
from router_service.domain.events import Answer, Heartbeat, RouterEvent
from services.background import end
from services.domain.requests import TokenFrame

_EVENTS_AHEAD = 8  # events that are made while the reader has not yet taken the ones before
MAX_JOINED_TOKENS = 512  # of an answer, in one event

Start = Callable[[Callable[[str, TokenFrame], None]], AsyncGenerator[RouterEvent, None]]
"""Begins the events; the parts of the answer are handed to the callable, with their tier."""


async def with_heartbeats(
    start: Start, interval_s: float, batching: AnswerBatching | None = None
) -> AsyncGenerator[RouterEvent | Heartbeat, None]:
    """Pass events and the answer on as they come, in order, and a Heartbeat after each `interval_s` without one.

    Parts of the answer that have come since the reader took the last event are joined: the slower the reader, the fewer its
    events. The events are read in a task of their own: that they are waited for must not end when a heartbeat is sent. An
    event costs no timer: each stream has one, which is set again when it goes off. Leaving the iteration closes the events
    before it returns.
    batching: whether parts behind the first wait for each other; without it none does.

    Raises:
        Exception: What the events raise, behind the events that came before it.
    """
    loop, relay = asyncio.get_running_loop(), _Relay(batching)
    task = asyncio.create_task(relay.read(start(relay.answer)), name="events of a stream")
    task.add_done_callback(lambda _: relay.news.set())
    last_s = loop.time()
    timer = loop.call_at(last_s + interval_s, relay.timer_went_off)
    try:
        while True:
            while relay.events:
                yield relay.take()
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
    """Reads events ahead, up to a bound; what of the answer comes meanwhile is at most one reply."""

    def __init__(self, batching: AnswerBatching | None) -> None:
        self._batching = batching
        self._answered = self._waiting = False
        self.events: deque[RouterEvent] = deque()
        self.news, self.room = asyncio.Event(), asyncio.Event()
        self.timer_is_off = False

    def timer_went_off(self) -> None:
        self.timer_is_off = True
        self.news.set()

    def answer(self, tier: str, frame: TokenFrame) -> None:
        self.events.append(Answer(tier, frame))
        if self._waiting:
            return
        if self._answered and self._batching is not None and self._batching.waits():
            self._waiting = True
            self._batching.add(self._wake)
            return
        self._answered = True
        self.news.set()

    def _wake(self) -> None:
        self._waiting = False
        self.news.set()

    def take(self) -> RouterEvent:
        """The next event; of an answer as much as there is."""
        event = self.events.popleft()
        if isinstance(event, Answer):
            frames, tokens = [event.frame], len(event.frame.token_ids)
            while self.events and isinstance(more := self.events[0], Answer) and more.tier == event.tier:
                tokens += len(more.frame.token_ids)
                if tokens > MAX_JOINED_TOKENS:
                    break
                frames.append(more.frame)
                self.events.popleft()
            if len(frames) > 1:
                event = Answer(event.tier, TokenFrame.joined(frames))
        self.room.set()
        return event

    async def read(self, source: AsyncGenerator[RouterEvent, None]) -> None:
        async with aclosing(source):
            async for event in source:
                self.events.append(event)
                self.news.set()
                while len(self.events) >= _EVENTS_AHEAD:
                    self.room.clear()
                    await self.room.wait()
