"""What it takes to go from one plan to another: replicas to start and to stop, in which order, for how long. No I/O.

Replicas of the same tier, model, drafters and shape stay. The order of the others is that of `penstock up`, see
`services.domain.rolling`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.planner_service.question.planned_drafts import PlannedDrafters
from penstock.planner_service.question.site import Site
from penstock.services.domain.hardware import ReplicaShape, replica_weight_bytes
from penstock.services.domain.rolling import Kinds, ReplicaKind, Roll, roll_steps

LOAD_BYTES_PER_S, START_S = 2e9, 30.0  # the usual: a fast disk or a page cache; an engine that captures its graphs

Shapes = Sequence[Sequence[tuple[ReplicaShape, int]]]  # by tier


@dataclass(frozen=True, slots=True)
class Replicas:
    """`count` equal replicas of a tier."""

    tier: str
    shape: ReplicaShape
    count: int

    def __str__(self) -> str:
        return f"{self.count} x {self.tier} ({self.shape})"


@dataclass(frozen=True, slots=True)
class MoveStep:
    """Replicas that are stopped, then others that start on what is free. seconds: until these are ready.

    early: the tiers of which replicas are stopped before those that replace them are ready.
    """

    stops: tuple[Replicas, ...]
    starts: tuple[Replicas, ...]
    seconds: float
    early: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"stop {', '.join(map(str, self.stops))}"] if self.stops else []
        parts += [f"start {', '.join(map(str, self.starts))}, {self.seconds:.0f} s"] if self.starts else []
        parts += [f"{', '.join(self.early)} serves less meanwhile"] if self.early else []
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class PlanMove:
    """steps: in order. loaded_bytes: weights of the replicas that start.

    extra_gpus, extra_bytes: GPUs that hold new replicas while those that they replace still run, and the weights on them.
    """

    steps: tuple[MoveStep, ...]
    unchanged: int
    loaded_bytes: float
    extra_gpus: int
    extra_bytes: float

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)


@dataclass(frozen=True, slots=True)
class MoveSpeed:
    """load_bytes_per_s: of the weights of one replica. start_s: of an engine, in addition to loading."""

    load_bytes_per_s: float = LOAD_BYTES_PER_S
    start_s: float = START_S


@dataclass(frozen=True, slots=True)
class Served:
    """What the replicas of a tier hold: a model, and what drafts for it."""

    model: str
    drafters: PlannedDrafters = field(default_factory=PlannedDrafters)


def plan_move(
    site: Site, old: Shapes, new: Shapes, old_served: Sequence[Served], speed: MoveSpeed | None = None
) -> PlanMove:
    """The move on a site from the replicas of `old` to those of `new`, by tier. old_served: by tier, what `old` serves."""
    speed = speed or MoveSpeed()
    rooms = {each.name: each.gpus for each in site.types}
    roll = Roll(_kinds(old, old_served), _kinds(new, [_served(site, tier) for tier in range(len(new))]), rooms)
    unchanged = (roll.running & roll.target).total()
    steps: list[MoveStep] = []
    loaded, most_gpus, most_bytes = 0.0, 0, 0.0
    started = Kinds()
    for step in roll_steps(roll):
        roll = roll.after(step)
        loaded += sum(_bytes(site, kind) * count for kind, count in step.starts.items())
        started += step.starts
        waiting = {kind.tier for kind in roll.surplus}
        extra = {kind: count for kind, count in started.items() if kind.tier in waiting}
        most_gpus = max(most_gpus, sum(kind.gpus * count for kind, count in extra.items()))
        most_bytes = max(most_bytes, sum(_bytes(site, kind) * count for kind, count in extra.items()))
        seconds = max(
            (speed.start_s + _bytes(site, kind) / speed.load_bytes_per_s for kind in step.starts), default=0.0
        )
        early = tuple(site.tiers[tier] for tier in step.early)
        steps.append(MoveStep(_replicas(site, step.stops), _replicas(site, step.starts), seconds, early))
    return PlanMove(tuple(steps), unchanged, loaded, most_gpus, most_bytes)


def _kinds(shapes: Shapes, served: Sequence[Served]) -> Kinds:
    kinds = Kinds()
    for tier, (parts, holds) in enumerate(zip(shapes, served, strict=True)):
        kinds.update({ReplicaKind(tier, shape, str(holds), shape.gpus, shape.gpu): n for shape, n in parts})
    return +kinds


def _served(site: Site, tier: int) -> Served:
    speculation = site.speculation_of(tier)
    names = tuple(spec.name for spec, _ in speculation.drafters)
    drafters = PlannedDrafters(names, speculation.max_window) if names else PlannedDrafters()
    return Served(site.models[tier].name, drafters)


def _bytes(site: Site, kind: ReplicaKind) -> float:
    """The weights of one replica: of its model, copies of attention included, and of what drafts for it."""
    assert kind.shape is not None
    drafters = sum(spec.weight_bytes for spec, _ in site.speculation_of(kind.tier).drafters)
    return replica_weight_bytes(site.models[kind.tier], kind.shape) + drafters


def _replicas(site: Site, kinds: Kinds) -> tuple[Replicas, ...]:
    ordered = sorted(kinds.items(), key=lambda item: (item[0].tier, item[0].gpus))
    return tuple(
        Replicas(site.tiers[kind.tier], kind.shape, count) for kind, count in ordered if kind.shape is not None
    )
