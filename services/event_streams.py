"""A queue of the events of one reply, in which frames of tokens can bypass the task of the reader."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.types.replies import TokenFrame

OnTokens = Callable[[TokenFrame], None]
"""Takes the frames of a reply, in order, on the event loop. An exception ends the reply."""

_Event = TypeVar("_Event")


def unless_passed(frame: TokenFrame | None, on_tokens: OnTokens | None) -> TokenFrame | None:
    """The frame, for its reader; None where `on_tokens` has taken it, and where there is none."""
    if frame is None or on_tokens is None:
        return frame
    on_tokens(frame)
    return None


class EventStream(Generic[_Event]):
    """A queue of events that passes frames of tokens to a callback.

    If a frame arrives while the reader waits, all earlier events have been read and processed. So it is passed to
    `on_tokens` at once; otherwise it is queued. Without `on_tokens`, frames are read like other events.
    """

    __slots__ = ("_error", "_events", "_on_tokens", "_reader")

    def __init__(self, on_tokens: OnTokens | None = None) -> None:
        self._events: deque[_Event | TokenFrame] = deque()
        self._on_tokens = on_tokens
        self._reader: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    def pass_tokens(self, on_tokens: OnTokens) -> None:
        """Pass frames to `on_tokens` from now on, including queued ones."""
        self._on_tokens = on_tokens

    def put(self, event: _Event | TokenFrame) -> None:
        """Add the next event. Events after an error are dropped."""
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
        """End the stream with an error, after the queued events. Only the first error counts."""
        if self._error is None:
            self._error = error
            self._wake()

    async def get(self) -> _Event | TokenFrame:
        """The next event.

        Raises:
            BaseException: The error of the stream, or of `on_tokens`.
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
