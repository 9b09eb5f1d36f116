"""The state of the mesh as one process knows it, built from the records that arrive. No I/O: time is an argument.

Leases expire only while the state store is known to work: when it is unavailable or stuck, nothing expires, and requests are
served with the last known state. After a reconnection, instances get a full lease to publish again.

An expired lease means that the instance does not reach the store, not that it is dead. A view for serving requests keeps such
instances separately, by role, until they publish again, deregister or are forgotten: replies may be running there, and they
are the last resort for new requests.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

from penstock.services.domain.instances import LOADING, InstanceRecord, Role
from penstock.types.plans import Plan

PULL_INTERVAL_S = 0.1
"""Average interval at which a view is brought up to date, unless a setting says otherwise."""


@dataclass(slots=True)
class _Entry:
    record: InstanceRecord
    heard_at: float
    expired: bool = False  # whether its lease has expired
    reached: bool = False  # whether it has answered at the address of its record


class MeshView:
    """Instances by id, and the plan. All times are of a monotonic clock, in seconds."""

    def __init__(self, keep_expired: Set[Role] = frozenset()) -> None:
        """keep_expired: roles whose instances are kept after their lease has expired, until the caller forgets them."""
        self._entries: dict[str, _Entry] = {}
        self._in_order = True  # by instance id, which a new one may not be
        self._expired: dict[str, set[str]] = {}  # ids of instances with an expired lease, by address
        self._keep_expired = keep_expired
        self.plan: Plan | None = None
        self._connected_since: float | None = None
        self._synced_at = self._alive_at = float("-inf")
        self.version = 0
        """Grows with every change of what instances are there, and what they say of themselves."""
        self.members_version = 0
        """Grows with every change of what instances take requests of which tier and stage: not with their load."""

        self.unreadable: dict[str, str] = {}
        """Why the last entry of an instance could not be used, by instance."""

    @property
    def unreadable_reason(self) -> str:
        """Why the entry of one instance could not be used; empty where all could."""
        for instance_id, why in sorted(self.unreadable.items()):
            return f"of {len(self.unreadable)} ignored, {instance_id[:100]}: {why[:300]}"
        return ""

    @property
    def connected(self) -> bool:
        """Whether the state store is reachable."""
        return self._connected_since is not None

    def age_s(self, now: float) -> float:
        """Seconds since the state was last known to be current: 0 while connected, infinite before the first sync."""
        return 0.0 if self.connected else now - self._synced_at

    def connect(self, records: Iterable[InstanceRecord], plan: Plan | None, now: float) -> None:
        """Handle a (re)connection to the store, which holds `records` and `plan`."""
        self._connected_since = self._alive_at = now
        for record in records:
            self.hear(record, now)
        if plan is not None:
            self.follow(plan)

    def alive(self, now: float) -> None:
        """Record that the store was alive at `now`, and what instances had written by then is known."""
        self._alive_at = now

    def woke(self, now: float) -> None:
        """Handle a suspension of this process: instances get a full lease to publish again, as after a reconnection."""
        if self.connected:
            self._connected_since = self._alive_at = now

    def disconnect(self, now: float) -> None:
        if self.connected:
            self._connected_since, self._synced_at = None, now

    def hear(self, record: InstanceRecord, now: float) -> bool:
        """Apply a record that its instance wrote at `now`; False if it says nothing new.

        Of two records of the same version, the one with a load counts: readers may leave it out.
        Forgets instances with an expired lease at the same address: another process listens there now.
        """
        entry = self._entries.get(record.instance_id)
        if entry is not None and entry.record.version == record.version:
            entry.heard_at = now
            self._renew(entry)
            if record.load is None or entry.record.load is not None:
                return False
        elif entry is not None and entry.record.version > record.version:
            return False
        for other in self._expired.get(record.address, set()) - {record.instance_id}:
            self.forget(other)
        self.version += 1
        entry = self._entries.get(record.instance_id)
        if entry is None or _membership(entry.record) != _membership(record):
            self.members_version += 1
        if entry is None:
            self._in_order = self._in_order and record.instance_id > next(reversed(self._entries), "")
            self._entries[record.instance_id] = _Entry(record, now)
        else:
            self._renew(entry)
            entry.reached &= entry.record.epoch == record.epoch
            entry.record, entry.heard_at = record, now
        return True

    def forget(self, instance_id: str) -> None:
        """Remove an instance that has deregistered or is known to be gone."""
        entry = self._entries.pop(instance_id, None)
        if entry is not None:
            self.version += 1
            self.members_version += 1
            if entry.expired:
                self._not_expired(entry)

    def reach(self, record: InstanceRecord) -> None:
        """Record that an instance has answered at its address, unless it has restarted since."""
        if self.is_unreached(record):
            self._entries[record.instance_id].reached = True
            self.version += 1
            self.members_version += 1

    def is_unreached(self, record: InstanceRecord) -> bool:
        """Whether an instance, as started then, has a lease, and has not answered at its address yet."""
        entry = self._entries.get(record.instance_id)
        return entry is not None and entry.record.epoch == record.epoch and not (entry.reached or entry.expired)

    def _renew(self, entry: _Entry) -> None:
        """It has a lease again, if it had none."""
        if entry.expired:
            self._not_expired(entry)
            self.version += 1
            self.members_version += 1

    def _not_expired(self, entry: _Entry) -> None:
        """It has a lease again, or has left."""
        entry.expired = False
        here = self._expired[entry.record.address]
        here.remove(entry.record.instance_id)
        if not here:
            del self._expired[entry.record.address]

    def follow(self, plan: Plan) -> bool:
        """Apply a plan; False if it is not newer than the current one.

        A plan is newer by revision or by creation time, because revisions restart when planner and store have lost their
        data.
        """
        current = self.plan
        if current is not None and plan.revision <= current.revision and plan.created_at <= current.created_at:
            return False
        self.plan = plan
        return True

    def expire(self) -> list[str]:
        """Expire the leases that ended before the store was last alive; return the ids of the instances."""
        since, alive = self._connected_since, self._alive_at
        if since is None:
            return []
        ended = [
            i for i, e in self._entries.items() if not e.expired and alive - max(e.heard_at, since) > e.record.lease_s
        ]
        for instance_id in ended:
            entry = self._entries[instance_id]
            if entry.record.role in self._keep_expired and not entry.record.tier:
                entry.expired = True
                self._expired.setdefault(entry.record.address, set()).add(instance_id)
                self.version += 1
                self.members_version += 1
            else:
                self.forget(instance_id)
        return ended

    def instances(self, role: Role | None = None) -> list[InstanceRecord]:
        """Records of instances with a valid lease, sorted by instance id; without workers that load."""
        return self._records(role, expired=False)

    def loading(self, tier: str = "") -> list[InstanceRecord]:
        """Workers that load their model and do not serve yet, of a tier or of all."""
        records = [e.record for e in self._ordered() if e.record.tier and tier in ("", e.record.tier)]
        return [record for record in records if record.instance_id.removeprefix(LOADING) not in self._entries]

    def expired(self, role: Role | None = None) -> list[InstanceRecord]:
        """Last records of instances with an expired lease, sorted by instance id."""
        return self._records(role, expired=True)

    def find(self, instance_id: str) -> InstanceRecord | None:
        """The last record of an instance, with or without a lease."""
        entry = self._entries.get(instance_id)
        return entry.record if entry is not None else None

    def find_leased(self, instance_id: str) -> InstanceRecord | None:
        """The record of an instance with a lease."""
        entry = self._entries.get(instance_id)
        return entry.record if entry is not None and not entry.expired else None

    def workers(self, tier: str) -> list[InstanceRecord]:
        """Workers of a tier that accept new requests and have a valid lease, sorted by instance id."""
        return _taking(self.instances(Role.WORKER), tier)

    def reached_workers(self, tier: str) -> list[InstanceRecord]:
        """Those of `workers` that have answered at their address."""
        return [record for record in self.workers(tier) if not self.is_unreached(record)]

    def expired_workers(self, tier: str) -> list[InstanceRecord]:
        """The same for workers with an expired lease: the last resort."""
        return _taking(self.expired(Role.WORKER), tier)

    def heard_at_s(self, instance_id: str) -> float:
        """When its last record came; minus infinity for an instance that is not known."""
        entry = self._entries.get(instance_id)
        return entry.heard_at if entry is not None else float("-inf")

    def heard_ago_s(self, instance_id: str, now: float) -> float:
        return now - self.heard_at_s(instance_id)

    def _ordered(self) -> Iterable[_Entry]:
        """All entries by instance id: sorted once after many new ones, of which a process that starts reads thousands."""
        if not self._in_order:
            self._entries = dict(sorted(self._entries.items()))
            self._in_order = True
        return self._entries.values()

    def _records(self, role: Role | None, *, expired: bool) -> list[InstanceRecord]:
        if expired and not self._expired:
            return []
        return [
            e.record
            for e in self._ordered()
            if e.expired is expired and (role is None or e.record.role is role) and not e.record.tier
        ]


def _taking(workers: Iterable[InstanceRecord], tier: str) -> list[InstanceRecord]:
    """Workers of a tier that are not draining."""
    return [r for r in workers if not r.draining and r.model is not None and r.model.tier == tier]


def _membership(record: InstanceRecord) -> tuple[object, ...]:
    """What decides whether an instance takes requests, and which."""
    return record.role, record.draining, record.model.tier if record.model is not None else "", record.place
