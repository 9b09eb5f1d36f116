"""Every key and channel in Redis, in one place. `mesh` is the mesh's name: several can share one Redis."""

from dataclasses import dataclass


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

    @property
    def instance_events(self) -> str:
        """Channel: records as they change, and goodbyes."""
        return f"{self.mesh}:events:instances"

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
