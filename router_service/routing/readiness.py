"""Whether a router should get new requests. No I/O."""

from dataclasses import dataclass, field

from penstock.services.domain.instances import Role
from penstock.services.domain.mesh_view import MeshView
from penstock.types.mesh_status import Loading


@dataclass(frozen=True, slots=True)
class TierState:
    """Instances of one tier. live: with a lease, and have answered this router; without_lease: tried only if none is live;
    planned: by the plan."""

    live: int
    without_lease: int
    planned: int


@dataclass(frozen=True, slots=True)
class Readiness:
    """The state that decides. plan_revision: 0 before there is a plan. tiers: by name, in the order of the plan.

    unreadable: of instances whose entries cannot be used, why one cannot; empty where all can. loading: by tier, how far the
    model of its next worker is loaded. unreached: workers with a lease that have not answered yet, and their addresses.
    """

    draining: bool
    plan_revision: int
    state_connected: bool
    tiers: dict[str, TierState]
    unreadable: str = ""
    loading: dict[str, str] = field(default_factory=dict)
    unreached: dict[str, str] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Why the router should get no new requests; empty if it should.

        One tier with an instance is enough: it answers as far as it can. Without Redis, a router uses the last known state.
        """
        if self.draining:
            return "draining"
        if not self.plan_revision:
            return "no plan yet"
        if not any(tier.live + tier.without_lease for tier in self.tiers.values()):
            loading = (f"{tier} is loading: {how_far}" for tier, how_far in self.loading.items())
            silent = (f"{instance} does not answer at {address}" for instance, address in self.unreached.items())
            return "; ".join(filter(None, ("no tier has an instance", *loading, *silent, self.unreadable)))
        return ""


def readiness(view: MeshView, *, draining: bool) -> Readiness:
    """The router's readiness by its view of the mesh."""
    plan = view.plan
    tiers = {
        tier.name: TierState(len(view.reached_workers(tier.name)), len(view.expired_workers(tier.name)), tier.instances)
        for tier in (plan.tiers if plan is not None else ())
    }
    revision = plan.revision if plan is not None else 0
    far = sorted(view.loading(), key=lambda record: record.loading.share if record.loading is not None else 0.0)
    loading = {record.tier: str(record.loading or Loading()) for record in far}
    workers = [record for record in view.instances(Role.WORKER) if not record.draining]
    unreached = {record.instance_id: record.address for record in workers if view.is_unreached(record)}
    return Readiness(draining, revision, view.connected, tiers, view.unreadable_reason, loading, unreached)
