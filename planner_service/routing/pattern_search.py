"""The paper's routing search, for more than three tiers: a penalised score and a pattern search (CASCADIA, algorithm
1). No I/O.

From proportional routing, and from each tier alone: steps along one threshold or two against each other, the best of
all, then half the step where none is better. Nothing is proved of what it finds.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from penstock.planner_service.routing.grid import Point, moves_of
from penstock.planner_service.routing.quality import JudgedSample, proportional

STABLE_ROUNDS = 3


def pattern_search(
    judged: JudgedSample, score: Callable[[Sequence[float]], float], begin: Sequence[float] = ()
) -> tuple[tuple[float, ...], float]:
    """(thresholds, the least score found), from thresholds to begin with, or proportional routing and each tier alone."""
    levels = [judged.levels(tier) for tier in range(len(judged.tiers) - 1)]

    def thresholds(at: Point) -> tuple[float, ...]:
        return tuple(float(levels[t][i]) for t, i in enumerate(at))

    @functools.cache  # most moves of one round are among those of the next
    def score_at(at: Point) -> float:
        return score(thresholds(at))

    sizes = [len(level) for level in levels]
    first = begin or proportional(judged)
    starts = [tuple(int(np.searchsorted(level[:-1], h)) for level, h in zip(levels, first, strict=True))]
    if not begin:  # what is passed over and what is not are far apart
        starts += [
            tuple(0 if t == tier else size - 1 for t, size in enumerate(sizes)) for tier in range(len(sizes) + 1)
        ]
    best, at = min(_descend(score_at, start, sizes) for start in starts)
    return thresholds(at), best


def _descend(score: Callable[[Point], float], at: Point, sizes: Sequence[int]) -> tuple[float, Point]:
    """(the least score found, where): the best of all moves, halving the steps where none is better."""
    best = score(at)
    steps = [max(1, size // 4) for size in sizes]
    stable = 0
    while stable < STABLE_ROUNDS or max(steps) > 1:
        least, moved = min((score(move), move) for move in sorted(moves_of(at, steps, sizes)))
        if least < best:
            best, at, stable = least, moved, 0
        else:
            stable += 1
            steps = [max(1, step // 2) for step in steps]
    return best, at
