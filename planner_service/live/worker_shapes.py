"""The shapes of a mesh's workers, as its plans say them: those of the mesh file, unless a plan has others. No I/O."""

import dataclasses
from collections.abc import Iterator, Sequence

from penstock.services.domain.hardware import ReplicaShape
from penstock.services.extensions.engines import engine_of, tier_in_shape
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.types.deployments import ReplicaGroup
from penstock.types.plans import TierPlan
from penstock.types.problems import FieldProblem


class WorkerShapes:
    """What the engines of a mesh file's tiers say of shapes."""

    def __init__(self, mesh: MeshFile) -> None:
        self._mesh = mesh
        self._own = {tier.name: engine_of(mesh, tier).shape(tier) for tier in mesh.tiers}

    def filled(self, tier: TierPlan) -> TierPlan:
        """The tier with all of its instances by their shapes: one shape has as many as the tier."""
        own = self._own.get(tier.name)
        if own is None or not tier.instances:
            return dataclasses.replace(tier, replicas=())
        groups = [dataclasses.replace(group, gpu=group.gpu or own.gpu) for group in tier.replicas] or [own.times(1)]
        if len(groups) == 1:
            groups = [dataclasses.replace(groups[0], count=tier.instances)]
        return dataclasses.replace(tier, replicas=tuple(groups))

    def problems(self, tier: TierPlan, field: str) -> Iterator[FieldProblem]:
        """Why the tier cannot have the replicas that its plan says. tier: as `filled` returns it. field: of the plan."""
        if len(tier.replicas) > 1 and (count := sum(group.count for group in tier.replicas)) != tier.instances:
            yield FieldProblem(f"{field}.replicas", f"are {count}, but the tier has {tier.instances} instances")
        for i, group in enumerate(tier.replicas):
            for problem in self._group_problems(tier.name, group):
                yield FieldProblem(f"{field}.replicas[{i}]", problem)

    def taken(self, tier: str, groups: Sequence[ReplicaGroup]) -> bool:
        """Whether the tier's engine has workers of these shapes."""
        return self._own.get(tier) is not None and not any(True for g in groups for _ in self._group_problems(tier, g))

    def gpus_of(self, tier: TierPlan) -> int:
        """The GPUs of all workers that a plan has of a tier."""
        if self._own.get(tier.name) is None:
            return 0
        shaped = [
            (tier_in_shape(self._mesh, self._mesh.tier(tier.name), ReplicaShape.of(group)), group.count)
            for group in tier.replicas
        ]
        return sum(engine_of(self._mesh, each).gpu_count(each) * count for each, count in shaped)

    def _group_problems(self, name: str, group: ReplicaGroup) -> Iterator[str]:
        shape, tier = ReplicaShape.of(group), self._mesh.tier(name)
        if shape == self._own[name]:
            return
        try:
            ReplicaShape.named(shape.name)
            shaped = tier_in_shape(self._mesh, tier, shape).model_copy(update={"workers": group.count})
            engine = engine_of(self._mesh, shaped)
        except (SettingsError, ValueError) as error:
            yield str(error)
        else:
            yield from (f"{problem.field}: {problem.problem}" for problem in engine.problems(shaped, self._mesh))
