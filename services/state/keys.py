"""Every key and channel in Redis, in one place. `mesh` is the mesh's name: several can share one Redis."""

import re
from dataclasses import dataclass

from services.domain.instances import InstanceRecord, Role

ALL_GROUPS = "*"


def tier_group(tier: str) -> str:
    """The group of a tier's workers."""
    return f"{Role.WORKER.value}:{tier}"


def group_of(record: InstanceRecord) -> str:
    """Who is told together: the workers of one tier, or the instances of another role."""
    return tier_group(record.model.tier) if record.model is not None else record.role.value


@dataclass(frozen=True, slots=True)
class Keys:
    """Names for one mesh."""

    mesh: str

    def instance(self, instance_id: str) -> str:
        """String: an instance's record, expiring with its lease."""
        return f"{self.mesh}:instance:{instance_id}"

    @property
    def instances(self) -> str:
        """Set: ids of instances that may have a record."""
        return f"{self.mesh}:instances"

    def instance_events(self, group: str) -> str:
        """Channel: records of a group (`group_of`) as they change, and goodbyes. `*`: the pattern of all groups."""
        mesh = re.sub(r"([][*?\\])", r"\\\1", self.mesh) if group == ALL_GROUPS else self.mesh
        return f"{mesh}:events:instances:{group}"

    @property
    def plan_events(self) -> str:
        """Channel: plans as they become current."""
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
        """Stream, capped: windows of sampled requests."""
        return f"{self.mesh}:workload"

    @property
    def spans(self) -> str:
        """Stream, capped: spans that have ended."""
        return f"{self.mesh}:spans"
