"""Requests that wait for a place at an instance, by tier. They are woken in order of arrival when there is room."""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Callable


class PlaceQueue:
    """room: number of free places of a tier; None if no instance can be tried, at which all that wait are woken once.

    next_change_s: seconds until there may be room although no record changed.
    """

    def __init__(self, room: Callable[[str], int | None], next_change_s: Callable[[], float]) -> None:
        self._room, self._next_change_s = room, next_change_s
        self._waiting: dict[str, dict[int, asyncio.Future[None]]] = {}  # by tier, then by number
        self._deserted: set[str] = set()  # tiers that had no instance to try at the last check
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def number(self) -> int:
        """A request's number in the queue, valid until it is placed."""
        return next(self._numbers)

    def deserted(self) -> tuple[str, ...]:
        """Tiers that requests wait for and that have no instance to try."""
        return tuple(tier for tier, waiting in self._waiting.items() if waiting and self._room(tier) is None)

    async def wait(self, tier: str, number: int, until_s: float) -> None:
        """Return when the request with this number should try again: there may be room for it, or the time is up.

        until_s: on the event loop's clock.
        """
        turn = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(tier, {})
        waiting[number] = turn
        self._set_timer()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # wake another for its place
                self._wake_in(tier)
            raise
        finally:
            waiting.pop(number, None)

    def wake(self) -> None:
        """Wake as many requests as there is room for now."""
        for tier in [tier for tier, waiting in self._waiting.items() if waiting]:
            self._wake_in(tier)

    def _wake_in(self, tier: str) -> None:
        waiting, room = self._waiting[tier], self._room(tier)
        if room is None:
            room = 0 if tier in self._deserted else len(waiting)
            self._deserted.add(tier)
        else:
            self._deserted.discard(tier)
        for number in heapq.nsmallest(room, waiting):
            turn = waiting.pop(number)
            if not turn.done():
                turn.set_result(None)

    def _set_timer(self) -> None:
        """Wake requests at the latest when the next pause of an instance ends."""
        loop = asyncio.get_running_loop()
        at = loop.time() + self._next_change_s()
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        self.wake()
        if any(self._waiting.values()):
            self._set_timer()
