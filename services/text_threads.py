"""Processes long texts on a thread with a bounded queue, so that they do not block the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.services.domain.errors import Overloaded, Unavailable
from penstock.types.prompts import ChatPrompt, Prompt

_T = TypeVar("_T")

INLINE_CHARACTERS = 4_096
"""A text of this length is tokenized in 0.4 ms. Passing it to a thread takes 0.03 ms on an idle machine, but milliseconds
when other threads hold the GIL."""

MAX_WAITING_CHARACTERS = 16_000_000
"""Eight prompts of the largest length that a request may have: about eight seconds of work."""

CHARACTERS_PER_S = 2_000_000.0  # for the delay of retries; measured tokenizers reach 1 to 5 million


def prompt_characters(prompt: Prompt) -> int:
    """Number of characters to render and tokenize; 0 for a prompt of token ids."""
    roles = sum(len(m.role) + 1 for m in prompt.messages) if isinstance(prompt, ChatPrompt) else 0
    return prompt.characters + roles


class TextThread:
    """Runs work on texts in order of arrival. Work whose future was cancelled is not started."""

    def __init__(self, name: str, max_waiting_characters: int = MAX_WAITING_CHARACTERS) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._max, self._waiting, self._lock = max_waiting_characters, 0, threading.Lock()

    async def run(self, characters: int, work: Callable[[], _T]) -> _T:
        """Do `work` on a text of this length: at once if it is short, otherwise on the thread. Raises as `submit`."""
        return work() if characters <= INLINE_CHARACTERS else await self.submit(characters, work)

    def submit(self, characters: int, work: Callable[[], _T]) -> "asyncio.Future[_T]":
        """Queue `work` on a text of this length. Cancelling the future removes it from the queue.

        Raises:
            Overloaded: The queue is full. An empty queue accepts any text.
            Unavailable: The thread is closed.
        """
        with self._lock:
            if self._waiting and self._waiting + characters > self._max:
                problem = f"{self._waiting} characters are waiting to be tokenized"
                raise Overloaded(problem, max(0.1, self._waiting / CHARACTERS_PER_S))
            self._waiting += characters

        def leave(_: object) -> None:
            with self._lock:
                self._waiting -= characters

        try:
            job = self._executor.submit(work)
        except RuntimeError:
            leave(None)
            raise Unavailable("the text thread is closed") from None
        job.add_done_callback(leave)
        return asyncio.wrap_future(job)

    def close(self) -> None:
        """Cancel work that has not started."""
        self._executor.shutdown(wait=False, cancel_futures=True)
