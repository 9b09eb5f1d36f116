"""The paper's routing search, for more than three tiers: a penalised score and a pattern search (CASCADIA, algorithm
1). No I/O.

From proportional routing, and from each tier alone: steps along one threshold or two against each other, the best of
all, then half the step where none is better. Nothing is proved of what it finds.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.quality import JudgedSample, chebyshev, proportional, route

STABLE_ROUNDS = 3
PENALTY = 1e4  # of the whole spread of quality, in seconds: large enough that a plan that meets the target wins
EXCESS_PENALTY = 1e9  # of the whole spread of latency, in points of quality: a ten-millionth of it undoes all quality


def chebyshev_search(deployer: Deployer, min_quality: float, judged: JudgedSample) -> tuple[tuple[float, ...], float]:
    """(thresholds, J) of the paper's loop with a pattern search as its routing solver."""

    def score(thresholds: Sequence[float]) -> float:
        latency = deployer.latency_s(thresholds)
        return chebyshev(latency, route(judged, thresholds).quality, min_quality, judged.best, judged.worst, PENALTY)

    return pattern_search(judged, score)


def pattern_search(
    judged: JudgedSample, score: Callable[[Sequence[float]], float], begin: Sequence[float] = ()
) -> tuple[tuple[float, ...], float]:
    """(thresholds, the least score found), from thresholds to begin with, or proportional routing and each tier alone."""
    levels = [judged.levels(tier) for tier in range(len(judged.tiers) - 1)]

    def thresholds(at: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(float(levels[t][i]) for t, i in enumerate(at))

    @functools.cache  # most moves of one round are among those of the next
    def score_at(at: tuple[int, ...]) -> float:
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


def _descend(
    score: Callable[[tuple[int, ...]], float], at: tuple[int, ...], sizes: Sequence[int]
) -> tuple[float, tuple[int, ...]]:
    """(the least score found, where): the best of all moves, halving the steps where none is better."""
    best = score(at)
    steps = [max(1, size // 4) for size in sizes]
    stable = 0
    while stable < STABLE_ROUNDS or max(steps) > 1:
        least, moved = min((score(move), move) for move in _moves(at, steps, sizes))
        if least < best:
            best, at, stable = least, moved, 0
        else:
            stable += 1
            steps = [max(1, step // 2) for step in steps]
    return best, at


def _moves(at: tuple[int, ...], steps: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """One threshold up or down; one up and another down, along the edge of the target; one to either end."""
    moves = {(*at[:t], end, *at[t + 1 :]) for t, size in enumerate(sizes) for end in (0, size - 1, size - 2)}
    for t, u in itertools.product(range(len(at)), repeat=2):
        for sign in (-1, 1):
            move = list(at)
            move[t] += sign * steps[t]
            if u != t:
                move[u] -= sign * steps[u]
            moves.add(tuple(min(size - 1, max(0, i)) for i, size in zip(move, sizes, strict=True)))
    return sorted(moves)
