"""Turns that callers take one after the other, however much each of them asks for."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from penstock.services.domain.errors import Overloaded

RETRY_S = 1.0


@dataclass(slots=True)
class Turn:
    """A turn that is held. rest_s: how long its caller's next one has to wait after it; others do not."""

    rest_s: float = 0.0


class FairTurns:
    """`at_once` turns, at most one of a caller. At most `most_waiting` are waited for, half of them by one caller."""

    def __init__(self, at_once: int, most_waiting: int) -> None:
        self._free, self._most = asyncio.Semaphore(at_once), most_waiting
        self._waiting = Counter[str]()  # by caller
        self._own: WeakValueDictionary[str, asyncio.Lock] = (
            WeakValueDictionary()
        )  # by caller, of whom one waits for a turn

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[Turn]:
        """Wait for a turn of a caller, and hold it as long as the context lasts.

        Raises:
            Overloaded: Too many are waited for.
        """
        waiting = self._waiting.total()
        if self._waiting[caller] >= self._most // 2 or waiting >= self._most:
            raise Overloaded(f"{waiting} are already waiting", RETRY_S)
        held, own = Turn(), self._own.setdefault(caller, asyncio.Lock())
        async with AsyncExitStack() as stack:
            self._waiting[caller] += 1
            try:
                await own.acquire()
                stack.callback(_release, own, held)
                await stack.enter_async_context(self._free)
            finally:
                self._waiting -= Counter([caller])
            yield held


def _release(own: asyncio.Lock, held: Turn) -> None:
    """Let the next turn of a caller be waited for, after its rest."""
    if held.rest_s:
        asyncio.get_running_loop().call_later(held.rest_s, own.release)
    else:
        own.release()
