"""In which order equal replicas replace others: new ones start before old ones stop, as far as there are GPUs. No I/O.

Where no GPU is free for a new replica, old ones stop first: of the tier that loses the smallest share of its replicas, and
all of a tier only where nothing else makes room.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.services.domain.hardware import ReplicaShape

UNLIMITED = float("inf")


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """What equal replicas have in common. tier: its place in the cascade. gpus: that one takes, of a pool that others take
    from, too."""

    tier: int
    shape: ReplicaShape | None
    gpus: int = 0
    pool: str = ""


Kinds = Counter[ReplicaKind]


@dataclass(frozen=True, slots=True)
class RollStep:
    """Replicas that stop, then others that start on what is free. early: tiers of which replicas stop before those that
    replace them are ready."""

    stops: Kinds
    starts: Kinds
    early: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Roll:
    """From the replicas that run to the target. rooms: GPUs by pool; a pool that is missing has enough."""

    running: Kinds
    target: Kinds
    rooms: Mapping[str, float]

    @property
    def missing(self) -> Kinds:
        return self.target - self.running

    @property
    def surplus(self) -> Kinds:
        return self.running - self.target

    def after(self, step: RollStep) -> "Roll":
        return Roll(self.running - step.stops + step.starts, self.target, self.rooms)

    def starts(self) -> Kinds:
        """What can start now, the largest first: all, where no replica will stop to make room."""
        free, chosen = self._free(), Kinds()
        will_be_freed = {kind.pool for kind in self.surplus}
        for kind, count in sorted(self.missing.items(), key=lambda item: (-item[0].gpus, item[0].tier)):
            if kind.gpus and kind.pool in will_be_freed:
                count = min(count, int(max(0.0, min(free[kind.pool], 1e9)) // kind.gpus))
            if count:
                chosen[kind] = count
                free[kind.pool] -= kind.gpus * count
        return chosen

    def replaced(self, ready: Kinds) -> Kinds:
        """What may stop now: of tiers whose target is ready."""
        waiting = {kind.tier for kind in self.target - ready}
        return Kinds({kind: count for kind, count in self.surplus.items() if kind.tier not in waiting})

    def room(self) -> Kinds:
        """What stops to make room for one missing replica, at the smallest loss. Nothing, where nothing can.

        The replicas of one tier go before those of others; which tier that is, and for which replica, is tried.
        """
        tried = [
            (*self._loss(stops), kind.gpus, kind.tier, first != kind.tier, first, stops)
            for kind in self.missing
            for first in {each.tier for each in self.surplus if each.pool == kind.pool}
            if (stops := self._room_for(kind, first))
        ]
        return min(tried, key=lambda each: each[:-1])[-1] if tried else Kinds()

    def _room_for(self, kind: ReplicaKind, first: int) -> Kinds:
        """The fewest that stop so that a replica fits, of the tier `first` before others."""
        short, stops = kind.gpus - self._free()[kind.pool], Kinds()
        for each, count in sorted(self.surplus.items(), key=lambda item: (item[0].tier != first, _key(item[0]))):
            if each.pool == kind.pool and each.gpus and short > 0:
                stops[each] = min(count, -int(-short // each.gpus))
                short -= stops[each] * each.gpus
        return stops if short <= 0 else Kinds()

    def _loss(self, stops: Kinds) -> tuple[bool, float]:
        """(whether a tier loses all of its replicas, the largest share that one loses)."""
        had, lost = self._by_tier(self.running), self._by_tier(stops)
        share = max(lost[tier] / had[tier] for tier in lost)
        return share == 1, share

    @staticmethod
    def _by_tier(kinds: Kinds) -> Counter[int]:
        counts = Counter[int]()
        for kind, count in kinds.items():
            counts[kind.tier] += count
        return counts

    def _free(self) -> dict[str, float]:
        free = {kind.pool: self.rooms.get(kind.pool, UNLIMITED) for kind in (self.running | self.target)}
        for kind, count in self.running.items():
            free[kind.pool] -= kind.gpus * count
        return free


def roll_steps(roll: Roll) -> Iterator[RollStep]:
    """All steps, each once what was started before is ready."""
    while roll.running != roll.target:
        stops = roll.replaced(roll.running)
        starts = roll.after(RollStep(stops, Kinds())).starts()
        early = Kinds()
        if not starts and roll.missing:
            early = roll.after(RollStep(stops, Kinds())).room()
            starts = roll.after(RollStep(stops + early, Kinds())).starts()
        if not (stops or starts or early):  # more than there is: all that is left goes
            early, starts = roll.surplus, roll.missing
        step = RollStep(stops + early, starts, tuple(sorted({kind.tier for kind in early})))
        yield step
        roll = roll.after(step)


def next_moves(roll: Roll, ready: Kinds) -> tuple[Kinds, Kinds]:
    """(what starts, what stops) now. ready: of the replicas that run, those that take requests.

    A replica that is missing also starts where nothing that stops could make room: until there are GPUs, it waits for them.
    """
    starts = roll.starts()
    if starts:
        return starts, Kinds()
    if stops := roll.replaced(ready):
        return Kinds(), stops
    if not roll.missing or (roll.running & roll.target) - ready:  # what is loading will let others stop
        return Kinds(), Kinds()
    stops = roll.room()
    return (Kinds(), stops) if stops else (roll.missing, Kinds())


def step_text(step: RollStep, tiers: Sequence[str]) -> str:
    """`stop 1 x large (TP=4); start 2 x large (TP=2); large serves less meanwhile`. tiers: names."""
    parts = [f"stop {_words(step.stops, tiers)}"] if step.stops else []
    parts += [f"start {_words(step.starts, tiers)}"] if step.starts else []
    parts += [f"{', '.join(tiers[tier] for tier in step.early)} serves less meanwhile"] if step.early else []
    return "; ".join(parts)


def _words(kinds: Kinds, tiers: Sequence[str]) -> str:
    """`2 x small (TP=1), 1 x large`."""
    return ", ".join(
        f"{count} x {tiers[kind.tier]}" + ("" if kind.shape is None else f" ({kind.shape})")
        for kind, count in sorted(kinds.items(), key=lambda item: _key(item[0]))
        if count
    )


def _key(kind: ReplicaKind) -> tuple[object, ...]:
    return kind.tier, kind.gpus, str(kind.shape)
