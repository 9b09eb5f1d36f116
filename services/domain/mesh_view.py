"""One process's picture of the mesh, kept from records as they arrive. No I/O: time is handed in.

An instance's silence counts only as far as the state store itself has shown signs of life: while that is away, or stuck,
nothing expires and the mesh is served on the last picture. When it is back, instances get a whole lease to speak up again
before they count as gone.

The end of a lease says that an instance does not reach the store, not that it is dead. A view that serves requests keeps such
instances apart, by role, until they are heard again, say goodbye or are forgotten: streams may run there, and they are the
last resort for new requests.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

from services.domain.instances import InstanceRecord, Role
from services.domain.plans import Plan


@dataclass(slots=True)
class _Entry:
    record: InstanceRecord
    heard_at: float
    expired: bool = False  # its lease has ended


class MeshView:
    """Instances by id and the plan. All times are one monotonic clock's, in seconds."""

    def __init__(self, keep_expired: Set[Role] = frozenset()) -> None:
        """keep_expired: roles whose instances are kept when their lease has ended; whoever asks for that forgets them."""
        self._entries: dict[str, _Entry] = {}
        self._keep_expired = keep_expired
        self._plan: Plan | None = None
        self._connected_since: float | None = None
        self._synced_at: float | None = None
        self._alive_at = float("-inf")

    @property
    def plan(self) -> Plan | None:
        return self._plan

    @property
    def connected(self) -> bool:
        """Whether the state store is in reach."""
        return self._connected_since is not None

    def age_s(self, now: float) -> float:
        """Seconds since the picture was last known to be true; 0 while connected; infinite before the first sync."""
        if self.connected:
            return 0.0
        return now - self._synced_at if self._synced_at is not None else float("inf")

    def connect(self, records: Iterable[InstanceRecord], plan: Plan | None, now: float) -> None:
        """The store is in reach (again) and holds `records` and `plan`."""
        self._connected_since = self._alive_at = now
        for record in records:
            self.hear(record, now)
        if plan is not None:
            self.follow(plan)

    def alive(self, now: float) -> None:
        """The store has shown a sign of life: a message, or an answer."""
        self._alive_at = now

    def woke(self, now: float) -> None:
        """This process stood still until now: instances get a whole lease to speak up again, as after a connection."""
        if self.connected:
            self._connected_since = self._alive_at = now

    def disconnect(self, now: float) -> None:
        if self.connected:
            self._connected_since, self._synced_at = None, now

    def hear(self, record: InstanceRecord, now: float) -> bool:
        """Take in a record; False if it is older than what is known.

        Instances without a lease at the same address are forgotten: another process listens there now.
        """
        known = self._entries.get(record.instance_id)
        if known is not None and known.record.version >= record.version:
            if known.record.version == record.version:
                known.heard_at, known.expired = now, False
            return False
        for other in self.expired():
            if other.address == record.address:
                del self._entries[other.instance_id]
        self._entries[record.instance_id] = _Entry(record, now)
        return True

    def forget(self, instance_id: str) -> None:
        """The instance has said goodbye, or is known to be gone."""
        self._entries.pop(instance_id, None)

    def follow(self, plan: Plan) -> bool:
        """Take in a plan; False if it is no newer than the one followed.

        Newer is the greater revision, or the later creation: revisions begin anew after planner and store lost everything.
        """
        known = self._plan
        if (
            known is not None
            and plan.revision <= known.revision
            and plan.provenance.created_at <= known.provenance.created_at
        ):
            return False
        self._plan = plan
        return True

    def expire(self) -> list[str]:
        """End the leases that have run out by the store's last sign of life, and name their instances."""
        since, alive = self._connected_since, self._alive_at
        if since is None:
            return []
        ended = [
            i for i, e in self._entries.items() if not e.expired and alive - max(e.heard_at, since) > e.record.lease_s
        ]
        for instance_id in ended:
            if self._entries[instance_id].record.role in self._keep_expired:
                self._entries[instance_id].expired = True
            else:
                del self._entries[instance_id]
        return ended

    def instances(self, role: Role | None = None) -> list[InstanceRecord]:
        """Records of instances with a lease, in order of instance id."""
        return self._records(role, expired=False)

    def expired(self, role: Role | None = None) -> list[InstanceRecord]:
        """Last records of instances whose lease has ended and that are kept, in order of instance id."""
        return self._records(role, expired=True)

    def find(self, instance_id: str) -> InstanceRecord | None:
        """The last record of an instance, with or without a lease."""
        entry = self._entries.get(instance_id)
        return entry.record if entry is not None else None

    def workers(self, tier: str) -> list[InstanceRecord]:
        """The workers of a tier that take new requests and have a lease, in order of instance id."""
        return _taking(self.instances(Role.WORKER), tier)

    def expired_workers(self, tier: str) -> list[InstanceRecord]:
        """Likewise of those whose lease has ended: to be tried where no other can be."""
        return _taking(self.expired(Role.WORKER), tier)

    def heard_ago_s(self, instance_id: str, now: float) -> float:
        entry = self._entries.get(instance_id)
        return now - entry.heard_at if entry is not None else float("inf")

    def _records(self, role: Role | None, *, expired: bool) -> list[InstanceRecord]:
        return sorted(
            (
                e.record
                for e in self._entries.values()
                if e.expired is expired and (role is None or e.record.role is role)
            ),
            key=lambda r: r.instance_id,
        )


def _taking(workers: Iterable[InstanceRecord], tier: str) -> list[InstanceRecord]:
    """Those of a tier that do not drain."""
    return [r for r in workers if not r.draining and r.model is not None and r.model.tier == tier]
