"""Turns that callers take one after the other, however much each of them asks for."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.services.domain.errors import Overloaded

RETRY_S = 1.0


@dataclass(slots=True)
class Turn:
    """A turn that is held. rest_s: how long its caller's next one has to wait after it; others do not."""

    rest_s: float = 0.0


class FairTurns:
    """`at_once` turns, at most one of a caller. At most `most_waiting` are waited for, half of them by one caller."""

    def __init__(self, at_once: int, most_waiting: int) -> None:
        self._free, self._most = at_once, most_waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, the one whose turn is next first
        self._running: set[str] = set()

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[Turn]:
        """Wait for a turn of a caller, and hold it as long as the context lasts.

        Raises:
            Overloaded: Too many are waited for.
        """
        own, waiting = len(self._waiting.get(caller, ())), sum(map(len, self._waiting.values()))
        if own >= self._most // 2 or waiting >= self._most:
            raise Overloaded(f"{waiting} are already waiting", RETRY_S)
        loop, held = asyncio.get_running_loop(), Turn()
        turn = loop.create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._give()
        try:
            await turn
            yield held
        finally:
            if turn.cancelled():  # while it was waited for
                self._remove(caller, turn)
            else:
                self._free += 1
                if held.rest_s:
                    loop.call_later(held.rest_s, self._rested, caller)
                else:
                    self._running.discard(caller)
                self._give()

    def _rested(self, caller: str) -> None:
        self._running.discard(caller)
        self._give()

    def _give(self) -> None:
        """Give free turns to the callers that are next."""
        for caller in [each for each in self._waiting if each not in self._running][: self._free]:
            turns = self._waiting.pop(caller)
            turns.popleft().set_result(None)
            if turns:
                self._waiting[caller] = turns  # its next turn comes after those of the others
            self._running.add(caller)
            self._free -= 1

    def _remove(self, caller: str, turn: "asyncio.Future[None]") -> None:
        self._waiting[caller].remove(turn)
        if not self._waiting[caller]:
            del self._waiting[caller]
