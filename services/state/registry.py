"""Publishes the record and the load of this instance."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import NoReturn

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from services.background import end, supervise
from services.domain.instances import InstanceRecord, Load
from services.domain.stages.places import StagePlace
from services.state import codec
from services.state.connection import StateUnavailable, state_errors
from services.state.keys import Keys, group_of

_log = logging.getLogger(__name__)

GOODBYE = b"gone "  # message of deregistration: this, then the instance id


async def _ignore(_: bool) -> None:
    """Ignore the change."""


class Registrar(AbstractAsyncContextManager["Registrar"]):
    """Publishes one instance's record with a lease, as long as the context lasts.

    `load` and `place` are called for every publication. A changed record is published at most every `interval_s`, an
    unchanged one every third of the lease. Without Redis, publication is retried; after Redis returns, even empty, the
    record is there again within `interval_s`. `on_link` is called when Redis becomes reachable or unreachable.
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
        self._redis, self._keys, self._record = redis, keys, record
        self._interval_s, self._load, self._place = interval_s, load, place
        self._on_link = on_link
        self._task: asyncio.Task[None] | None = None
        self._nudge = asyncio.Event()
        self.published = asyncio.Event()
        """Set once the record has reached Redis."""
        self.connected = False
        """Whether the last publication reached Redis."""

    async def __aenter__(self) -> "Registrar":
        self._task = supervise("registrar", self._run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        await end(self._task)
        with contextlib.suppress(StateUnavailable), state_errors():
            instance_id = self._record.instance_id
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(self._keys.instance(instance_id))
                pipe.srem(self._keys.instances, instance_id)
                pipe.publish(self._keys.instance_events(group_of(self._record)), GOODBYE + instance_id.encode())
                await pipe.execute()

    def drain(self, draining: bool = True) -> None:
        """Publish at once whether this instance accepts new requests."""
        self._record = dataclasses.replace(self._record, draining=draining)
        self._nudge.set()

    async def _run(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        published: InstanceRecord | None = None
        sent_at = 0.0
        while True:
            load = self._load() if self._load is not None else None
            current = dataclasses.replace(self._record, load=load, place=self._place())
            due = loop.time() - sent_at >= current.lease_s / 3
            if (
                published is None
                or due
                or dataclasses.replace(published, sequence=0) != dataclasses.replace(current, sequence=0)
            ):
                self._record = dataclasses.replace(self._record, sequence=self._record.sequence + 1)
                current = dataclasses.replace(current, sequence=self._record.sequence)
                try:
                    await self._publish(current)
                except StateUnavailable as error:
                    if self.connected or not self.published.is_set():
                        _log.warning("cannot publish this instance: %s", error)
                    published = None
                    await self._linked(False)
                else:
                    await self._linked(True)
                    self.published.set()
                    published, sent_at = current, loop.time()
            self._nudge.clear()
            with contextlib.suppress(TimeoutError):  # (wait_for of Python 3.11 can swallow a cancellation)
                async with asyncio.timeout(self._interval_s):
                    await self._nudge.wait()

    async def _linked(self, connected: bool) -> None:
        if connected is not self.connected:
            self.connected = connected
            await self._on_link(connected)

    async def _publish(self, record: InstanceRecord) -> None:
        with state_errors():
            async with self._redis.pipeline(transaction=True) as pipe:
                publish(pipe, self._keys, record)
                await pipe.execute()


def publish(pipe: Pipeline, keys: Keys, record: InstanceRecord) -> None:
    """Queue the commands that publish a record."""
    data = codec.record_to_json(record)
    pipe.set(keys.instance(record.instance_id), data, px=round(record.lease_s * 1000))
    pipe.sadd(keys.instances, record.instance_id)
    pipe.publish(keys.instance_events(group_of(record)), data)
