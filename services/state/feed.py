"""Keeps a MeshView current by subscription, so that serving a request needs no call to Redis."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import NoReturn

from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from services.background import end, supervise
from services.domain.instances import InstanceRecord
from services.domain.mesh_view import MeshView
from services.domain.plans import Plan
from services.stalls import StallMonitor
from services.state import codec
from services.state.connection import StateUnavailable, as_bytes, state_errors
from services.state.keys import ALL_GROUPS, Keys, group_of
from services.state.registry import GOODBYE

_log = logging.getLogger(__name__)

SILENCE_S = 1.0  # after this long without a message, Redis is pinged
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0


class MeshFeed(AbstractAsyncContextManager["MeshFeed"]):
    """Updates `view` as long as the context lasts, and calls `on_change` after every change.

    Each (re)connection subscribes first and then reads everything, so that no change is missed. group: follow only these
    instances (`group_of`) and the plan.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        view: MeshView,
        *,
        group: str = ALL_GROUPS,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._redis, self._keys, self.view, self._group = redis, keys, view, group
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self._stalls = StallMonitor()
        self.synced = asyncio.Event()
        """Set once the view has been filled for the first time."""

    async def __aenter__(self) -> "MeshFeed":
        await self._stalls.__aenter__()
        self._tasks = [
            supervise("mesh-feed", self._follow),
            supervise("mesh-feed-expiry", self._expire),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end(*self._tasks)
        await self._stalls.__aexit__(kind, error, trace)

    async def _follow(self) -> NoReturn:
        loop, pause = asyncio.get_running_loop(), RETRY_FIRST_S
        while True:
            try:
                async with self._redis.pubsub() as pubsub:
                    with state_errors():
                        await pubsub.subscribe(self._keys.plan_events)
                        if self._group == ALL_GROUPS:
                            await pubsub.psubscribe(self._keys.instance_events(ALL_GROUPS))
                        else:
                            await pubsub.subscribe(self._keys.instance_events(self._group))
                        records, plan = await self._read_all()
                        self.view.connect(records, plan, loop.time())
                        self.synced.set()
                        self._on_change()
                        pause = RETRY_FIRST_S
                        await self._listen(pubsub)
            except StateUnavailable as error:
                if self.view.connected:
                    _log.warning("serving with the last known state of the mesh: %s", error)
                self.view.disconnect(loop.time())
                self._on_change()
                await asyncio.sleep(pause)
                pause = min(pause * 2, RETRY_MOST_S)
            except Exception:
                self.view.disconnect(loop.time())  # there is no subscription until this task is restarted
                raise

    async def _read_all(self) -> tuple[list[InstanceRecord], Plan | None]:
        ids = await self._redis.smembers(self._keys.instances)
        names = sorted(as_bytes(instance_id).decode() for instance_id in ids)
        values = await self._redis.mget([self._keys.instance(name) for name in names]) if names else []
        read = [record for data in values if data is not None and (record := _record(as_bytes(data))) is not None]
        records = [record for record in read if self._group in (ALL_GROUPS, group_of(record))]
        return records, await self._read_plan()

    async def _read_plan(self) -> Plan | None:
        """The current plan; None without one."""
        revision = await self._redis.get(self._keys.plan_revision)
        data = await self._redis.get(self._keys.plan(int(revision))) if revision is not None else None
        return _plan(as_bytes(data)) if data is not None else None

    async def _listen(self, pubsub: PubSub) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=SILENCE_S)
            if message is None:
                await self._redis.ping()  # a silent connection may be dead
            self.view.alive(loop.time())
            if message is None:
                continue
            data: bytes = message["data"]
            if message["channel"].decode() == self._keys.plan_events:
                plan = await self._read_plan()  # the message is only the news: any service may publish there
                changed = plan is not None and self.view.follow(plan)
            elif data.startswith(GOODBYE):
                self.view.forget(data.removeprefix(GOODBYE).decode())
                changed = True
            else:
                record = _record(data)
                changed = record is not None and self.view.hear(record, loop.time())
            if changed:
                self._on_change()

    async def _expire(self) -> NoReturn:
        loop, stalled_s = asyncio.get_running_loop(), self._stalls.total_s()
        while True:
            await asyncio.sleep(0.25)
            if (total_s := self._stalls.total_s()) > stalled_s:
                _log.warning("this process was suspended for %.1f s", total_s - stalled_s)
                stalled_s = total_s
                self.view.woke(loop.time())
            expired = self.view.expire()
            if expired:
                _log.warning("lease expired: %s", ", ".join(expired))
                with contextlib.suppress(StateUnavailable), state_errors():
                    await self._redis.srem(self._keys.instances, *expired)
                self._on_change()


def _record(data: bytes) -> InstanceRecord | None:
    try:
        return codec.record_from_json(data)
    except ValueError as error:
        _log.warning("ignored: %s", error)
        return None


def _plan(data: bytes) -> Plan | None:
    try:
        return codec.plan_from_json(data)
    except ValueError as error:
        _log.warning("ignored: %s", error)
        return None
