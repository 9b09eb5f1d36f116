"""The workers of a mesh by their kind: what the plan wants, what runs, which start and which stop. No I/O."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.placement.processes import MeshProcess, index_of, process_named, tier_of, worker
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.instances import InstanceRecord
from penstock.services.domain.rolling import Kinds, ReplicaKind
from penstock.services.extensions.engines import engine_of
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.types.plans import Plan, TierPlan


class Workers:
    """The workers of a mesh. pool_of: the GPUs that a worker takes its own from, by name."""

    def __init__(self, mesh: MeshFile, pool_of: Callable[[MeshProcess], str]) -> None:
        self._mesh, self._pool_of = mesh, pool_of
        self.tiers = [tier.name for tier in mesh.tiers]
        self._own = {tier.name: engine_of(mesh, tier).shape(tier) for tier in mesh.tiers}

    def target(self, plan: Plan, desired: Mapping[str, int]) -> Kinds:
        """The plan's. Of a tier that the plan does not have, and where it does not say the shapes, the mesh file's.

        desired: counts by tier instead of the plan's.
        """
        kinds = Kinds()
        for tier in self._mesh.tiers:
            planned = plan.tier(tier.name)
            shapes = [(self._own[tier.name], tier.workers)] if planned is None else self._shapes(planned)
            if len(shapes) == 1:
                shapes = [(shapes[0][0], desired.get(tier.name, shapes[0][1]))]
            kinds.update({self._kind(tier.name, shape): count for shape, count in shapes if count})
        return kinds

    def running(self, names: Sequence[str]) -> Kinds:
        """Those of the names of processes."""
        return Kinds(self.kind_of(name) for name in names if tier_of(name))

    def ready(self, records: Sequence[InstanceRecord], kinds: Kinds) -> Kinds:
        """Those that take new requests, of some kinds."""
        of_names = {(self.tiers[kind.tier], _shape_name(kind.shape)): kind for kind in kinds}
        cards = (record.model for record in records if not record.draining and record.model is not None)
        names = ((card.tier, card.shape or _shape_name(self._own.get(card.tier))) for card in cards)
        return Kinds(of_names[name] for name in names if name in of_names)

    def started(self, kinds: Kinds, names: Sequence[str]) -> Iterator[MeshProcess]:
        """Processes of new workers, with the lowest free indexes. names: of processes that run."""
        taken = list(names)
        for kind in kinds.elements():
            tier = self.tiers[kind.tier]
            candidates = (worker(self._mesh, tier, index, kind.shape) for index in itertools.count())
            process = next(candidate for candidate in candidates if not self._meet(candidate, taken))
            taken.append(process.name)
            yield process

    def stopped(self, kinds: Kinds, names: Sequence[str]) -> list[str]:
        """The names of those that stop: of each kind the last started ones. names: in the order of their start."""
        return [
            name
            for kind, count in kinds.items()
            for name in [name for name in names if tier_of(name) and self.kind_of(name) == kind][-count:]
        ]

    def kind_of(self, name: str) -> ReplicaKind:
        """The kind of a worker by the name of its process."""
        shape = name.partition("@")[2]
        return self._kind(tier_of(name), ReplicaShape.named(shape) if shape else self._own[tier_of(name)])

    def _shapes(self, planned: TierPlan) -> list[tuple[ReplicaShape | None, int]]:
        own = self._own[planned.name]
        if own is None or not planned.replicas:
            return [(own, planned.instances)]
        return [(ReplicaShape.of(group), group.count) for group in planned.replicas]

    def _kind(self, tier: str, shape: ReplicaShape | None) -> ReplicaKind:
        process = worker(self._mesh, tier, 0, shape)
        return ReplicaKind(self.tiers.index(tier), shape, process.gpus, self._pool_of(process))

    def _meet(self, process: MeshProcess, names: Sequence[str]) -> bool:
        """Whether a worker would have GPUs of its tier that another one has: of its index, the next ones of its number."""
        same = [name for name in names if tier_of(name) == tier_of(process.name)]
        return any(
            _first(process) < _first(other) + _each(other) and _first(other) < _first(process) + _each(process)
            for other in (process_named(name, self._mesh, ()) for name in same)
        )


def _shape_name(shape: ReplicaShape | None) -> str:
    return shape.name if shape is not None else ""


def _each(process: MeshProcess) -> int:
    """How many places of its tier a worker takes: GPUs, or one without."""
    return max(1, process.gpus)


def _first(process: MeshProcess) -> int:
    return index_of(process.name) * _each(process)
