"""Publishes the record and the load of this instance."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from redis.asyncio import Redis

from penstock.services.background import BackgroundWork, Works
from penstock.services.domain.instances import InstanceRecord, Load
from penstock.services.state.connection import StateUnavailable
from penstock.services.state.instances import InstanceStore
from penstock.services.state.keys import Keys
from penstock.services.ticks import next_tick_s
from penstock.types.mesh_status import StagePlace

_log = logging.getLogger(__name__)


async def _ignore(_: bool) -> None:
    """Ignore the change."""


class Registrar(BackgroundWork):
    """Publishes one instance's record with a lease, as long as the context lasts.

    `load` and `place` are called for every publication. A changed record is published at most at each tick of `interval_s`,
    an unchanged one every third of the lease, which renews the registration, too. Without Redis, publication is retried;
    after Redis returns, even empty, the record is there again within `interval_s`. `on_link` is called when Redis becomes
    reachable or unreachable.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        record: InstanceRecord,
        *,
        interval_s: float,
        load: Callable[[], Load] | None = None,
        place: Callable[[], StagePlace | None] = lambda: None,
        on_link: Callable[[bool], Awaitable[None]] = _ignore,
    ) -> None:
        self._store, self._record = InstanceStore(redis, keys), record
        self._interval_s, self._load, self._place = interval_s, load, place
        self._on_link = on_link
        self._nudge = asyncio.Event()
        self.published = asyncio.Event()
        """Set once the record has reached Redis."""
        self.connected = False
        """Whether the last publication reached Redis."""

    def work(self) -> Works:
        return {"registrar": self._run}

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        last = dataclasses.replace(self._record, sequence=self._record.sequence + 1)
        with contextlib.suppress(StateUnavailable):
            await self._store.publish(last, gone=True)

    def drain(self, draining: bool = True) -> None:
        """Publish at once whether this instance accepts new requests."""
        self._record = dataclasses.replace(self._record, draining=draining)
        self._nudge.set()

    async def _run(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        published: InstanceRecord | None = None
        renewed_at = 0.0
        while True:
            load = self._load() if self._load is not None else None
            current = dataclasses.replace(self._record, load=load, place=self._place())
            renew = published is None or loop.time() - renewed_at >= current.lease_s / 3
            if renew or published is None or published != dataclasses.replace(current, sequence=published.sequence):
                self._record = dataclasses.replace(self._record, sequence=self._record.sequence + 1)
                current = dataclasses.replace(current, sequence=self._record.sequence)
                try:
                    await self._store.publish(current, renew=renew)
                except StateUnavailable as error:
                    if self.connected or not self.published.is_set():
                        _log.warning("cannot publish this instance: %s", error)
                    published = None
                    await self._linked(False)
                else:
                    await self._linked(True)
                    self.published.set()
                    published = current
                    renewed_at = loop.time() if renew else renewed_at
            self._nudge.clear()
            with contextlib.suppress(TimeoutError):  # (wait_for of Python 3.11 can swallow a cancellation)
                async with asyncio.timeout_at(next_tick_s(loop.time(), self._interval_s)):
                    await self._nudge.wait()

    async def _linked(self, connected: bool) -> None:
        if connected is not self.connected:
            self.connected = connected
            await self._on_link(connected)
