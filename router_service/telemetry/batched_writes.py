"""Writes what requests leave to Redis in batches, and holds it while Redis is unavailable."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, NoReturn, TypeVar

from penstock.services.background import BackgroundWork, Works
from penstock.services.state.connection import StateUnavailable

_log = logging.getLogger(__name__)

WRITE_S = 1.0  # between two writes

Entry = TypeVar("Entry")


class BatchedWrites(BackgroundWork, Generic[Entry]):
    """Entries on their way to Redis. No entry is logged.

    name: of the task. what: of the entries, for the log. batch: entries per write. held: entries that are held while Redis is
    unavailable; older ones are dropped.
    """

    def __init__(
        self, name: str, what: str, write: Callable[[tuple[Entry, ...]], Awaitable[None]], *, batch: int, held: int
    ) -> None:
        self._name, self._what, self._write_batch, self._size = name, what, write, batch
        self._held: deque[Entry] = deque(maxlen=held)
        self._batch: tuple[Entry, ...] = ()  # being written

    def work(self) -> Works:
        return {self._name: self._write}

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        await self._write_once()

    def add(self, entry: Entry) -> None:
        self._held.append(entry)

    async def _write(self) -> NoReturn:
        while True:
            await asyncio.sleep(WRITE_S)
            await self._write_once()

    async def _write_once(self) -> None:
        """Write what is held; keep it if Redis is unavailable."""
        try:
            while self._batch or self._held:
                if not self._batch:
                    self._batch = tuple(self._held.popleft() for _ in range(min(self._size, len(self._held))))
                await self._write_batch(self._batch)
                self._batch = ()
        except StateUnavailable as error:
            _log.warning("%s cannot be recorded yet: %s", self._what, error)
