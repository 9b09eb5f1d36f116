"""Work on long texts beside the event loop: a thread, and a bound on what waits for it."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.domain.errors import Overloaded, Unavailable

_T = TypeVar("_T")

INLINE_CHARACTERS = 4_096
"""A text of this length is tokenized in 0.4 ms. Handing it to a thread takes 0.03 ms on an idle machine, but
milliseconds where other busy threads hold the GIL."""

MAX_WAITING_CHARACTERS = 16_000_000
"""Eight prompts of the greatest length that a request may have: some eight seconds' work."""

FIRST_CHARACTERS_PER_S = 2_000_000.0  # until some work is done: tokenizers measure 1 to 5 million


class TextThread:
    """Runs work on texts in the order in which it comes. What its caller no longer waits for is not begun."""

    def __init__(self, name: str, max_waiting_characters: int = MAX_WAITING_CHARACTERS) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._max, self._waiting, self._lock = max_waiting_characters, 0, threading.Lock()
        self._per_s = FIRST_CHARACTERS_PER_S

    @property
    def waiting_characters(self) -> int:
        """Of the work that waits or is being done."""
        return self._waiting

    def submit(self, characters: int, work: Callable[[], _T]) -> "asyncio.Future[_T]":
        """Begin `work` on so many characters; cancelling what is returned takes it out of the queue.

        Raises:
            Overloaded: too much is waiting already. A text that nothing waits before is always taken.
            Unavailable: it is closed.
        """
        with self._lock:
            if self._waiting and self._waiting + characters > self._max:
                what = f"{self._waiting} characters are waiting to be tokenized"
                raise Overloaded(what, max(0.1, self._waiting / self._per_s))
            self._waiting += characters

        def timed() -> _T:
            began = time.perf_counter()
            try:
                return work()
            finally:
                self._per_s = characters / max(1e-6, time.perf_counter() - began)

        def leave(_: object) -> None:
            with self._lock:
                self._waiting -= characters

        try:
            job = self._executor.submit(timed)
        except RuntimeError:
            leave(None)
            raise Unavailable("closed: nothing more is tokenized") from None
        job.add_done_callback(leave)
        return asyncio.wrap_future(job)

    def close(self) -> None:
        """Cancel what has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)
