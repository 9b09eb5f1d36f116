"""Events of one reply on their way to its one reader. Tokens, which are most of them, need not wait for the reader to run."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from services.domain.requests import TokenFrame

OnTokens = Callable[[TokenFrame], None]
"""Takes a reply's frames, in order, on the event loop. What it raises fails this reply."""

_Event = TypeVar("_Event")


class EventStream(Generic[_Event]):
    """A queue of events whose frames of tokens are passed on by call.

    A frame that comes while the reader waits has nothing before it: everything earlier has been read, and whoever the
    reader hands events to has handled them. So it goes to `on_tokens` at once; any other frame waits for its turn. Without
    `on_tokens` frames are read as other events are.
    """

    __slots__ = ("_error", "_events", "_on_tokens", "_reader")

    def __init__(self, on_tokens: OnTokens | None = None) -> None:
        self._events: deque[_Event | TokenFrame] = deque()
        self._on_tokens = on_tokens
        self._reader: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    def pass_tokens(self, on_tokens: OnTokens) -> None:
        """From now on frames go to `on_tokens`, those that are here already among them."""
        self._on_tokens = on_tokens

    def put(self, event: _Event | TokenFrame) -> None:
        """Take the next event; one behind an error is dropped."""
        if self._error is not None:
            return
        waiting = self._reader is not None and not self._reader.done()
        if waiting and self._on_tokens is not None and isinstance(event, TokenFrame):
            try:
                self._on_tokens(event)
            except Exception as error:
                self.fail(error)
            return
        self._events.append(event)
        if waiting:
            self._wake()

    def fail(self, error: BaseException) -> None:
        """The stream ends with an error, behind what is here; of several errors with the first."""
        if self._error is None:
            self._error = error
            self._wake()

    async def get(self) -> _Event | TokenFrame:
        """The next event.

        Raises:
            BaseException: What the stream ended with, or what `on_tokens` raised.
        """
        while True:
            while self._events:
                event = self._events.popleft()
                if self._on_tokens is None or not isinstance(event, TokenFrame):
                    return event
                self._on_tokens(event)
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
