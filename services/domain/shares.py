"""Whole things shared out in proportion. No I/O."""

from collections.abc import Sequence


def apportioned(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in whole numbers in proportion to the weights (largest remainder; of equal ones the first)."""
    whole = sum(weights)
    counts = [int(total * weight // whole) for weight in weights]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] * whole - total * weights[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
