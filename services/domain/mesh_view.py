"""One process's picture of the mesh, kept from records as they arrive. No I/O: time is handed in.

An instance's silence counts only as far as the state store itself has shown signs of life: while that is away, or stuck,
nothing expires and the mesh is served on the last picture. When it is back, instances get a whole lease to speak up again
before they count as gone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.domain.instances import InstanceRecord, Role
from services.domain.plans import Plan


@dataclass(slots=True)
class _Entry:
    record: InstanceRecord
    heard_at: float


class MeshView:
    """Instances by id and the plan. All times are one monotonic clock's, in seconds."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
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
        """Take in a record; False if it is older than what is known."""
        known = self._entries.get(record.instance_id)
        if known is not None and known.record.version >= record.version:
            if known.record.version == record.version:
                known.heard_at = now
            return False
        self._entries[record.instance_id] = _Entry(record, now)
        return True

    def forget(self, instance_id: str) -> None:
        """The instance has said goodbye."""
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
        """Drop instances whose lease has run out by the store's last sign of life, and name them."""
        since, alive = self._connected_since, self._alive_at
        if since is None:
            return []
        gone = [i for i, e in self._entries.items() if alive - max(e.heard_at, since) > e.record.lease_s]
        for instance_id in gone:
            del self._entries[instance_id]
        return gone

    def instances(self, role: Role | None = None) -> list[InstanceRecord]:
        """Records in order of instance id."""
        return sorted(
            (e.record for e in self._entries.values() if role is None or e.record.role is role),
            key=lambda r: r.instance_id,
        )

    def workers(self, tier: str) -> list[InstanceRecord]:
        """The workers of a tier that take new requests, in order of instance id."""
        return [
            r for r in self.instances(Role.WORKER) if not r.draining and r.model is not None and r.model.tier == tier
        ]

    def heard_ago_s(self, instance_id: str, now: float) -> float:
        entry = self._entries.get(instance_id)
        return now - entry.heard_at if entry is not None else float("inf")
