"""Heartbeats between the events of a stream, so that its reader can tell waiting from a router that is stuck."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from penstock.router_service.answer_batching import AnswerBatching
from penstock.router_service.domain.events import Answer, RequestOutput, RouterEvent
from penstock.services.background import end
from penstock.types.events import Heartbeat
from penstock.types.replies import TokenFrame

MAX_UNREAD_EVENTS = 8
"""A request gives its place back at its end when its reader has at most this many events left to read."""
MAX_JOINED_TOKENS = 512  # of an answer, in one event

Start = Callable[[RequestOutput], Coroutine[Any, Any, object]]
"""Runs a request, which passes its events and its answer to the output."""


async def with_heartbeats(
    start: Start, interval_s: float, batching: AnswerBatching | None = None
) -> AsyncGenerator[RouterEvent | Heartbeat, None]:
    """Yield the events and the answer of a request as they come, and a Heartbeat after each `interval_s` without one.

    Parts of the answer that came since the reader took the last event are joined: a slow reader gets fewer events.
    The request runs in a task of its own, which a heartbeat does not interrupt; leaving the iteration ends it. An event costs
    no timer: each stream has one, which is set again when it goes off.
    batching: whether parts after the first wait for others; without it they do not.

    Raises:
        Exception: The error of the request, after the events before it.
    """
    loop, relay = asyncio.get_running_loop(), _Relay(batching)
    task = asyncio.create_task(start(relay), name="events of a stream")
    task.add_done_callback(lambda _: relay.wake.set())
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
            relay.wake.clear()
            if not relay.events and not task.done():
                await relay.wake.wait()
    finally:
        timer.cancel()
        await end(task)
        if not task.cancelled():
            task.exception()  # retrieved: the reader may have left before the error


class _Relay:
    """The output of a request until it is read: at most its events and one answer."""

    def __init__(self, batching: AnswerBatching | None) -> None:
        self._batching = batching
        self._answered = self._waiting = False
        self._read = asyncio.Event()
        self.events: deque[RouterEvent] = deque()
        self.wake = asyncio.Event()
        self.timer_is_off = False

    def timer_went_off(self) -> None:
        self.timer_is_off = True
        self.wake.set()

    def event(self, event: RouterEvent) -> None:
        self.events.append(event)
        self.wake.set()

    def answer(self, tier: str, frame: TokenFrame) -> None:
        self.events.append(Answer(tier, frame))
        if self._waiting:
            return
        if self._answered and self._batching is not None and self._batching.waits():
            self._waiting = True
            self._batching.add(self._end_wait)
            return
        self._answered = True
        self.wake.set()

    async def sent(self) -> None:
        while len(self.events) > MAX_UNREAD_EVENTS:
            self._read.clear()
            await self._read.wait()

    def _end_wait(self) -> None:
        self._waiting = False
        self.wake.set()

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
        self._read.set()
        return event
