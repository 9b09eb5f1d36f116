"""Keeps a MeshView current by pulling, so that serving a request needs no call to Redis."""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import NoReturn

from redis.asyncio import Redis

from penstock.services.background import BackgroundWork, Works
from penstock.services.domain.instances import InstanceRecord, Load
from penstock.services.domain.mesh_view import PULL_INTERVAL_S, MeshView
from penstock.services.stalls import StallMonitor
from penstock.services.state import codec
from penstock.services.state.connection import StateUnavailable, as_bytes, state_errors
from penstock.services.state.instances import Entry, InstanceStore
from penstock.services.state.keys import Keys, group_of
from penstock.services.ticks import tick
from penstock.types.plans import Plan

_log = logging.getLogger(__name__)

EXPIRE_S = 0.25  # between two looks for leases that have expired
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0
JITTER = 0.2
"""Of the interval between two pulls, up or down: so that many processes do not pull at the same time."""
MAX_GROUPS = 256
"""Groups that are read, the first ones by name. A mesh has one for each tier and three more."""
NAMED = 20
"""Instances that one line of the log names."""
ENTRIES_AT_ONCE = 100
"""Entries that are decoded before other tasks of the event loop have their turn."""
HEADS_PER_PULL = 250
"""Of a larger group, a feed with a sample reads the heads less often: on average so many in each pull."""

Sample = Callable[[], Sequence[str]]


class MeshFeed(BackgroundWork):
    """Updates `view` as long as the context lasts, and calls `on_change` after every pull that changed it.

    It pulls about every `interval_s`. A router reads all entries of all groups. A worker (`group`, `sample`) reads what
    instances its group has and which places they serve, and the load of the few that `sample` names at the time.

    A record counts as heard when its instance wrote it, by the store's clock. An entry that was read before says nothing
    new. An entry that is missing says nothing either: the store may have lost its data. An instance is removed when its
    entry says that it has gone, or when its lease has expired.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        view: MeshView,
        *,
        interval_s: float = PULL_INTERVAL_S,
        group: str = "",
        sample: Sample | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """group: follow only these instances (`group_of`) and the plan; empty for all. sample: of `group`, the instances
        whose load is read; None for all."""
        self._redis, self._keys, self.view = redis, keys, view
        self._store, self._interval_s = InstanceStore(redis, keys), interval_s
        self._group, self._sample = group, sample
        self._on_change = on_change
        self._stalls = StallMonitor()
        self._groups: Sequence[str] = [group] if group else []
        self._plan_revision: int | None = None
        self._bodies: dict[str, bytes] = {}  # by instance: as last read in a snapshot
        self._registrations: dict[str, InstanceRecord] = {}
        self._until_heads = 0  # pulls
        self.unusable_entries = 0
        """Entries and registrations that were not used, because they are not what they should be."""
        self.synced = asyncio.Event()
        """Set once the view has been filled for the first time."""

    def work(self) -> Works:
        return {**self._stalls.work(), "mesh-feed": self._follow, "mesh-feed-expiry": self._expire}

    async def find(self, instance_id: str) -> InstanceRecord | None:
        """The record of an instance of the feed's group that has a lease; read now if the view does not have it.

        Raises:
            StateUnavailable: The view does not have it, and Redis cannot be reached.
        """
        if self.view.find_leased(instance_id) is None:
            began = asyncio.get_running_loop().time()
            pulled = await self._store.pull((), group=self._group, instance_ids=[instance_id])
            await self._apply(pulled.singles, began)
        return self.view.find_leased(instance_id)

    async def _follow(self) -> NoReturn:
        loop, pause = asyncio.get_running_loop(), RETRY_FIRST_S
        while True:
            try:
                if await self._pull():
                    self._on_change()
                pause = RETRY_FIRST_S
                await asyncio.sleep(self._interval_s * random.uniform(1 - JITTER, 1 + JITTER))
            except StateUnavailable as error:
                if self.view.connected:
                    _log.warning("serving with the last known state of the mesh: %s", error)
                self.view.disconnect(loop.time())
                self._on_change()
                await asyncio.sleep(pause)
                pause = min(pause * 2, RETRY_MOST_S)
            except Exception:
                self.view.disconnect(loop.time())  # nothing is pulled until this task is restarted
                raise

    async def _pull(self) -> bool:
        """Read what is due; return whether the view has changed."""
        loop, connected = asyncio.get_running_loop(), self.view.connected
        sampled = list(self._sample()) if self._sample is not None else []
        whole = self._until_heads <= 0 or not connected
        began = loop.time()
        pulled = await self._store.pull(
            self._groups if whole else (), heads=self._sample is not None, group=self._group, instance_ids=sampled
        )
        entries = pulled.snapshots
        if not self._group and (new := self._follow_groups(pulled.groups)):
            entries = [*entries, *(await self._store.pull(new)).snapshots]
        changed = await self._apply(pulled.singles, began)  # first: a head must not take away the load that it is of
        fresh = [entry for entry in entries if self._bodies.get(entry.instance_id) != entry.body]
        changed = await self._apply(fresh, began) or changed
        if whole:
            self._bodies = {entry.instance_id: entry.body for entry in entries}
            self._registrations = {i: r for i, r in self._registrations.items() if i in self._bodies}
            self.view.unreadable = {i: why for i, why in self.view.unreadable.items() if i in self._bodies}
            self._until_heads = math.ceil(len(entries) / HEADS_PER_PULL) if self._sample is not None else 0
        self._until_heads -= 1
        plan = None
        if pulled.plan_revision is not None and (pulled.plan_revision != self._plan_revision or not connected):
            plan = await self._read_plan(pulled.plan_revision)
        self._plan_revision = pulled.plan_revision
        if not connected:
            self.view.connect((), plan, loop.time())
            self.synced.set()
            return True
        if whole:  # leases are judged by what the store had then
            self.view.alive(began)
        return (plan is not None and self.view.follow(plan)) or changed

    def _follow_groups(self, groups: frozenset[str]) -> list[str]:
        """Follow these groups from now on; return those that were not read in this pull."""
        followed = sorted(groups)[:MAX_GROUPS]
        if len(groups) > MAX_GROUPS:
            self._report("groups", ValueError(f"there are {len(groups)} groups; the first {MAX_GROUPS} are read"))
        new = [group for group in followed if group not in self._groups]
        self._groups = followed
        return new

    async def _apply(self, entries: Sequence[Entry], began: float) -> bool:
        """Apply entries that were read at `began`; return whether the view has changed."""
        decoded: list[tuple[Entry, codec.Head, Load | None]] = []
        for i, entry in enumerate(entries):
            if i % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
                await asyncio.sleep(0)
            try:
                decoded.append((entry, *entry.decoded()))
            except ValueError as error:
                self._report(entry.instance_id, error)
        await self._register([(e.instance_id, head) for e, head, _ in decoded if not head.gone])
        changed = False
        for i, (entry, head, load) in enumerate(decoded):
            if i % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
                await asyncio.sleep(0)
            known = self.view.find(entry.instance_id)
            registration = self._registrations.get(entry.instance_id)
            if head.gone:
                if known is not None and known.version <= head.at:
                    self.view.forget(entry.instance_id)
                    changed = True
            elif registration is not None and registration.epoch == head.epoch:
                changed = self.view.hear(head.record(registration, load), began - entry.age_s) or changed
        return changed

    async def _register(self, heads: Sequence[tuple[str, codec.Head]]) -> None:
        """Read the registrations of instances that are new, or have restarted."""
        registrations = self._registrations
        new = [i for i, head in heads if i not in registrations or registrations[i].epoch != head.epoch]
        if not new:
            return
        for instance_id, data in (await self._store.registrations(new)).items():
            try:
                registration = codec.registration_from_json(data)
                if registration.instance_id != instance_id:
                    raise ValueError(f"instance_id: is {registration.instance_id!r}"[:200])
                if self._group and group_of(registration) != self._group:
                    raise ValueError(f"group: is {group_of(registration)!r}"[:200])
            except ValueError as error:
                self._report(instance_id, error)
            else:
                registrations[instance_id] = registration
                self.view.unreadable.pop(instance_id, None)

    def _report(self, instance_id: str, error: ValueError) -> None:
        """Count an unusable entry, and log the first one of an instance."""
        self.unusable_entries += 1
        if instance_id not in self.view.unreadable:
            self.view.unreadable[instance_id] = str(error)
            _log.warning("ignored the entry of %r: %s", instance_id[:100], error)

    async def _read_plan(self, revision: int) -> Plan | None:
        with state_errors():
            data = await self._redis.get(self._keys.plan(revision))
        try:
            return codec.plan_from_json(as_bytes(data)) if data is not None else None
        except ValueError as error:
            _log.warning("ignored: %s", error)
            return None

    async def _expire(self) -> NoReturn:
        loop, stalled_s = asyncio.get_running_loop(), self._stalls.total_s()
        while True:
            await tick(EXPIRE_S)
            if (total_s := self._stalls.total_s()) > stalled_s:
                _log.warning("this process was suspended for %.1f s", total_s - stalled_s)
                stalled_s = total_s
                self.view.woke(loop.time())
            expired = self.view.expire()
            if expired:
                more = f" and {len(expired) - NAMED} others" if len(expired) > NAMED else ""
                _log.warning("lease expired: %s%s", ", ".join(expired[:NAMED]), more)
                self._on_change()
