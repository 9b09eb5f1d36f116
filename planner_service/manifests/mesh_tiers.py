"""A cascade plan in the terms of the mesh: thresholds and instance counts. No I/O."""

from collections.abc import Sequence


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
