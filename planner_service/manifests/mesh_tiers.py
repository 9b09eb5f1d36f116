"""A cascade plan in the terms of the mesh: thresholds, instance counts and the burst ladder. No I/O."""

import dataclasses
from collections.abc import Sequence

from penstock.types.rules import BurstLadder, BurstThreshold


def mesh_tiers(thresholds: Sequence[float | None], instances: Sequence[int]) -> list[tuple[float | None, int]]:
    """(threshold, instances) of each tier, as a plan of the mesh says them. thresholds: None or over 100 passes a tier over.

    A tier without instances is skipped there; what still reaches one that is on its way out is accepted at a full score
    only. The last tier with instances accepts everything: a request that no sampled one was like must not escalate to a
    tier without instances.
    """
    entries = [
        100.0 if h is None or h > 100 or not count else h for h, count in zip(thresholds, instances, strict=False)
    ]
    last = max((i for i, count in enumerate(instances) if count), default=len(entries))
    if last < len(entries):
        entries[last] = 0.0
    return list(zip([*entries, None], instances, strict=True))


def mesh_ladder(ladder: BurstLadder, instances: Sequence[int]) -> BurstLadder:
    """The burst ladder as a plan of the mesh says it: thresholds as in `mesh_tiers`, at each step.

    Raises:
        ValueError: A step has not one threshold for each tier but the last.
    """
    steps = []
    for step in ladder.steps:
        scores = [score for score, _ in mesh_tiers([rule.score for rule in step.thresholds], instances)[:-1]]
        rules = tuple(
            rule if score == rule.score else BurstThreshold(0.0 if score is None else score)
            for rule, score in zip(step.thresholds, scores, strict=True)
        )
        steps.append(dataclasses.replace(step, thresholds=rules))
    return dataclasses.replace(ladder, steps=tuple(steps))
