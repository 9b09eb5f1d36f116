"""What it takes to go from one plan to another: replicas to start and to stop, in which order, for how long. No I/O.

Replicas of the same tier, model, drafters and shape stay. New ones start on free GPUs next to the old ones, which are
stopped when the new ones of their tier are ready, as `penstock up` does. Where too few GPUs are free for all, that goes in
waves: what is no longer needed is stopped to make room, even of a tier whose new replicas are not ready, which then serves
less for a time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.planner_service.question.planned_drafts import PlannedDrafters
from penstock.planner_service.question.site import Site
from penstock.services.domain.hardware import ReplicaShape, replica_weight_bytes

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
    keep, starts, stops = Counter[_Key](), Counter[_Key](), Counter[_Key]()
    for tier, (before, after) in enumerate(zip(old, new, strict=True)):
        had, needed = Counter(dict(before)), Counter(dict(after))
        stays = old_served[tier] == _served(site, tier)
        same = had & needed if stays else Counter[ReplicaShape]()
        for counter, shapes in ((keep, same), (stops, had - same), (starts, needed - same)):
            counter.update({(tier, shape): count for shape, count in shapes.items()})
    return _Mover(site, speed, keep, starts, stops).move()


def _served(site: Site, tier: int) -> Served:
    speculation = site.speculation_of(tier)
    names = tuple(spec.name for spec, _ in speculation.drafters)
    drafters = PlannedDrafters(names, speculation.max_window) if names else PlannedDrafters()
    return Served(site.models[tier].name, drafters)


_Key = tuple[int, ReplicaShape]  # (tier, shape)


class _Mover:
    def __init__(
        self, site: Site, speed: MoveSpeed, keep: "Counter[_Key]", starts: "Counter[_Key]", stops: "Counter[_Key]"
    ) -> None:
        self.site, self.speed, self.starts, self.stops = site, speed, starts, stops
        self.unchanged = sum(keep.values())
        self.free = {each.name: each.gpus for each in site.types}
        for (_, shape), count in (keep + stops).items():
            self.free[shape.gpu] = self.free.get(shape.gpu, 0) - shape.gpus * count

    def move(self) -> PlanMove:
        steps: list[MoveStep] = []
        loaded, most_gpus, most_bytes = 0.0, 0, 0.0
        started: Counter[_Key] = Counter()
        while self.starts or self.stops:
            stops = self._take(self.stops, self._replaced())
            starts = self._fitting()
            early: Counter[_Key] = Counter()
            if not starts and self.starts:
                early = self._make_room()
                starts = self._fitting()
            if not starts and not stops and not early:
                early = Counter(self.stops)  # more than there is: all that is left goes
                self._take(self.stops, early)
                starts = Counter(self.starts)
            self.starts -= starts
            waiting = {tier for tier, _ in self.stops}
            own = sum(self._bytes(key) * n for key, n in starts.items())
            loaded += own
            started += starts
            extra = {key: n for key, n in started.items() if key[0] in waiting}
            most_gpus = max(most_gpus, sum(shape.gpus * n for (_, shape), n in extra.items()))
            most_bytes = max(most_bytes, sum(self._bytes(key) * n for key, n in extra.items()))
            seconds = max(map(self._start_s, starts), default=0.0)
            less = tuple(dict.fromkeys(self.site.tiers[tier] for tier, _ in sorted(early)))
            steps.append(MoveStep(self._said(stops + early), self._said(starts), seconds, less))
        return PlanMove(tuple(steps), self.unchanged, loaded, most_gpus, most_bytes)

    def _replaced(self) -> "Counter[_Key]":
        """What may stop: replicas of tiers of which nothing is left to start."""
        pending = {tier for tier, _ in self.starts}
        return Counter({key: n for key, n in self.stops.items() if key[0] not in pending})

    def _take(self, counter: "Counter[_Key]", taken: "Counter[_Key]") -> "Counter[_Key]":
        counter -= taken
        for (_, shape), n in taken.items():
            self.free[shape.gpu] = self.free.get(shape.gpu, 0) + shape.gpus * n
        return taken

    def _fitting(self) -> "Counter[_Key]":
        """What can start on the free GPUs, the largest first; they are taken."""
        chosen: Counter[_Key] = Counter()
        for key in sorted(self.starts, key=lambda key: (-key[1].gpus, key[0])):
            shape = key[1]
            count = min(self.starts[key], max(0, self.free.get(shape.gpu, 0)) // shape.gpus)
            if count:
                chosen[key] = count
                self.free[shape.gpu] -= shape.gpus * count
        return chosen

    def _make_room(self) -> "Counter[_Key]":
        """Stop as few as let the smallest replica start: of the tier that it is for, else of another."""
        tier, shape = min(self.starts, key=lambda key: (key[1].gpus, key[0]))
        stopped: Counter[_Key] = Counter()
        own_first = sorted(self.stops, key=lambda key: (key[0] != tier, key[1].gpus, key[0]))
        for key in (key for key in own_first if key[1].gpu == shape.gpu):
            while self.stops[key] and self.free[shape.gpu] < shape.gpus:
                stopped += self._take(self.stops, Counter({key: 1}))
        return stopped

    def _bytes(self, key: _Key) -> float:
        """The weights of one replica: of its model, copies of attention included, and of what drafts for it."""
        tier, shape = key
        drafters = sum(spec.weight_bytes for spec, _ in self.site.speculation_of(tier).drafters)
        return replica_weight_bytes(self.site.models[tier], shape) + drafters

    def _start_s(self, key: _Key) -> float:
        return self.speed.start_s + self._bytes(key) / self.speed.load_bytes_per_s

    def _said(self, replicas: "Counter[_Key]") -> tuple[Replicas, ...]:
        ordered = sorted(replicas.items(), key=lambda one: (one[0][0], one[0][1].gpus))
        return tuple(Replicas(self.site.tiers[tier], shape, n) for (tier, shape), n in ordered if n)
