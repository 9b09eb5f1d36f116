"""All keys in Redis. `mesh`: name of the mesh, so that several can share one Redis."""

from dataclasses import dataclass

from penstock.services.domain.instances import InstanceRecord, Role


def tier_group(tier: str) -> str:
    """The group of a tier's workers."""
    return f"{Role.WORKER.value}:{tier}"


def group_of(record: InstanceRecord) -> str:
    """The group of an instance: the workers of one tier, or the instances of another role."""
    return tier_group(record.model.tier) if record.model is not None else record.role.value


@dataclass(frozen=True, slots=True)
class Keys:
    """Names for one mesh."""

    mesh: str

    def instance(self, instance_id: str) -> str:
        """String: what an instance says of itself once, its address and model; expires with its lease."""
        return f"{self.mesh}:instance:{instance_id}"

    @property
    def groups(self) -> str:
        """Set: the groups (`group_of`) that have had instances."""
        return f"{self.mesh}:groups"

    def load(self, group: str) -> str:
        """Hash: the entry of each instance of a group, by instance id: its state and its load."""
        return f"{self.mesh}:load:{group}"

    def snapshot(self, group: str, *, heads: bool) -> str:
        """String: all entries of a group, kept for some milliseconds for all that read them. heads: without the load."""
        return f"{self.mesh}:snapshot:{'heads' if heads else 'all'}:{group}"

    @property
    def plan_revision(self) -> str:
        """String: the current plan's revision."""
        return f"{self.mesh}:plan:revision"

    def plan(self, revision: int) -> str:
        """String: the plan of a revision."""
        return f"{self.mesh}:plan:{revision}"

    @property
    def plan_leader(self) -> str:
        """String: the instance id of the planner that leads; expires with its lease."""
        return f"{self.mesh}:plan:leader"

    @property
    def workload(self) -> str:
        """Capped stream: windows of sampled requests."""
        return f"{self.mesh}:workload"

    @property
    def requests(self) -> str:
        """Capped stream: arrivals and token counts of the last requests."""
        return f"{self.mesh}:requests"

    @property
    def prompts(self) -> str:
        """Capped stream: sampled prompts, the only texts of users in Redis; see `router.sample_prompts`."""
        return f"{self.mesh}:prompts"

    @property
    def spans(self) -> str:
        """Capped stream: finished spans."""
        return f"{self.mesh}:spans"

    def limit(self, tenant: str, kind: str) -> str:
        """Hash: what a tenant has used of a limit, by second; of the concurrency, by router."""
        return f"{self.mesh}:limits:{tenant}:{kind}"

    def usage(self, day: str) -> str:
        """Hash: what tenants used on a day (UTC), by tenant, key, tier and measure."""
        return f"{self.mesh}:usage:{day}"
