"""Assigns instances of a tier to stages, and lengths to instances. No I/O.

There is no central assignment: every instance computes the same result from the same records, and keeps its stage if
possible.
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace

from penstock.services.domain.shares import apportioned
from penstock.services.domain.stages.layout import StageLayout
from penstock.types.mesh_status import StagePlace
from penstock.types.plans import Stage

MAX_NEIGHBOURS = 16
"""Instances whose load an instance compares with its own: so many averages are near those of the whole stage."""


def targets(instances: int, layout: StageLayout) -> tuple[int, ...]:
    """The number of instances per stage, given the number of live instances.

    With as many as the layout has: its numbers. With more or fewer: one per stage, and the rest in proportion to the layout's
    further instances (largest remainder). With fewer than stages: one each for the last stages, which can serve all lengths.
    """
    planned = [stage.instances for stage in layout.stages]
    if instances < len(planned):
        return (0,) * (len(planned) - instances) + (1,) * instances
    further = [count - 1 for count in planned]
    spare = apportioned(instances - len(planned), further if any(further) else planned)
    return tuple(1 + more for more in spare)


def with_instances(stages: tuple[Stage, ...], instances: int) -> tuple[Stage, ...]:
    """The same ranges on another number of instances (`targets`); none if there are fewer instances than stages."""
    if not stages or instances < len(stages):
        return ()
    counts = targets(instances, StageLayout(stages))
    return tuple(replace(stage, instances=count) for stage, count in zip(stages, counts, strict=True))


def assign(current: Mapping[str, int | None], layout: StageLayout) -> dict[str, int]:
    """The stage of every instance of a tier. current: stage by instance id; None for a new instance.

    Instances keep their stage as far as the targets allow; if a stage has too many, those with the greatest ids leave. These
    and the new instances fill the gaps in order of id, from the first stage on.
    """
    remaining = list(targets(len(current), layout))
    stages: dict[str, int] = {}
    for instance_id in sorted(current):
        stage = current[instance_id]
        if stage is not None and stage < len(remaining) and remaining[stage] > 0:
            stages[instance_id] = stage
            remaining[stage] -= 1
    gaps = (stage for stage, count in enumerate(remaining) for _ in range(count))
    for instance_id in sorted(current):
        if instance_id not in stages:
            stages[instance_id] = next(gaps)
    return stages


def by_preference(places: Mapping[str, StagePlace | None], tokens: int) -> list[list[str]]:
    """Instance ids in groups, the best first, for a sequence of `tokens` tokens.

    First the earliest stage that covers the length, then the later ones, last the stages that end before it, the longest
    first. An instance without a place serves every length.
    """
    covering: dict[int, list[str]] = {}
    too_short: dict[int, list[str]] = {}
    anywhere: list[str] = []
    for instance_id, place in sorted(places.items()):
        if place is None:
            anywhere.append(instance_id)
        else:
            (covering if tokens < place.to_tokens else too_short).setdefault(place.stage, []).append(instance_id)
    groups = [covering[stage] for stage in sorted(covering)] + [too_short[s] for s in sorted(too_short, reverse=True)]
    if anywhere:
        groups = [sorted([*anywhere, *(groups[0] if covering else ())]), *groups[1 if covering else 0 :]]
    return groups


def successors(places: Mapping[str, StagePlace | None], stage: int) -> list[str]:
    """The instances of the next stage that has any."""
    later = {place.stage for place in places.values() if place is not None and place.stage > stage}
    return peers(places, min(later)) if later else []


def peers(places: Mapping[str, StagePlace | None], stage: int) -> list[str]:
    """The instances of a stage, in order of id."""
    return sorted(i for i, place in places.items() if place is not None and place.stage == stage)


def neighbours(places: Mapping[str, StagePlace | None], instance_id: str, stage: int, turn: int) -> list[str]:
    """At most `MAX_NEIGHBOURS` instances that an instance of a stage compares its load with.

    places: of the other instances. Half are of its own stage and half of the next one; where one has fewer, the other may
    have more. turn: of a large stage, each turn has the next ones in order of id, and every instance begins with others.
    """
    here, after = peers(places, stage), successors(places, stage)
    half = MAX_NEIGHBOURS // 2
    of_here = min(len(here), max(half, MAX_NEIGHBOURS - len(after)))
    first = zlib.crc32(instance_id.encode())
    return [*_window(here, of_here, first, turn), *_window(after, MAX_NEIGHBOURS - of_here, first, turn)]


def _window(ids: list[str], size: int, first: int, turn: int) -> list[str]:
    """`size` of the ids, in a circle, or all: those of this turn, of a circle that begins at number `first`."""
    if len(ids) <= size:
        return ids
    begin = (first + turn * size) % len(ids)
    return [*ids, *ids][begin : begin + size]


def outgrown_to(places: Mapping[str, StagePlace | None], stage: int, tokens: int) -> list[str]:
    """The instances for a sequence that has outgrown `stage`: the earliest later stage that covers it, or the last one."""
    later = {i: place for i, place in places.items() if place is not None and place.stage > stage}
    return next(iter(by_preference(later, tokens)), [])
