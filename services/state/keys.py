"""All keys and channels in Redis. `mesh`: name of the mesh, so that several can share one Redis."""

import re
from dataclasses import dataclass

from services.domain.instances import InstanceRecord, Role

ALL_GROUPS = "*"


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
        """String: the record of an instance, which expires with its lease."""
        return f"{self.mesh}:instance:{instance_id}"

    @property
    def instances(self) -> str:
        """Set: ids of instances that may have a record."""
        return f"{self.mesh}:instances"

    def instance_events(self, group: str) -> str:
        """Channel: changed records of a group (`group_of`) and deregistrations. `*`: the pattern of all groups."""
        mesh = re.sub(r"([][*?\\])", r"\\\1", self.mesh) if group == ALL_GROUPS else self.mesh
        return f"{mesh}:events:instances:{group}"

    @property
    def plan_events(self) -> str:
        """Channel: each new current plan."""
        return f"{self.mesh}:events:plan"

    @property
    def plan_revision(self) -> str:
        """String: the current plan's revision."""
        return f"{self.mesh}:plan:revision"

    def plan(self, revision: int) -> str:
        """String: the plan of a revision."""
        return f"{self.mesh}:plan:{revision}"

    @property
    def workload(self) -> str:
        """Capped stream: windows of sampled requests."""
        return f"{self.mesh}:workload"

    @property
    def requests(self) -> str:
        """Capped stream: arrivals and token counts of the last requests."""
        return f"{self.mesh}:requests"

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
