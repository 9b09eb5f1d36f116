"""Routings of up to three tiers: a finite grid, and a search over it that says what it proves. No I/O.

Thresholds matter only at the distinct scores of the judged sample. Small grids are tried whole. On larger ones the
search begins spread over the grid, for each choice of tiers to pass over; improves what it found by moves of 1, 2, 4,
... levels, which cross plateaus; and spends what is left of its budget on the routings that could be the best by their
lower bounds. Nothing is assumed of how latency depends on traffic: each tier's percentile is over its own requests, so
more short ones among them can make it smaller.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.routing import bounds
from penstock.planner_service.routing.quality import JudgedSample, all_qualities
from penstock.planner_service.routing.solution import Proof
from penstock.planner_service.simulator.workload import Floats, Ints

Point = tuple[int, ...]
Evaluate = Callable[[Point, float], float]
INFEASIBLE = float("inf")
EPSILON = 1e-9  # of a mean score, or of seconds that decide whether one is below another
MOST_TIERS = 3
ENUMERATE_UP_TO = 400  # routings that are all tried
MOST_EVALUATIONS = 150  # of a grid that is larger
SPREAD = 6  # routings that a search begins with, for each choice of tiers to pass over, along its edge and again within


class Grid:
    """Combinations of thresholds, each a point of one or two coordinates, with their mean qualities."""

    def __init__(self, judged: JudgedSample) -> None:
        self.levels, self.qualities = all_qualities(judged)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.qualities.shape

    def thresholds(self, point: Sequence[int]) -> tuple[float, ...]:
        return tuple(float(level[i]) for level, i in zip(self.levels, point, strict=True))

    def nearest(self, thresholds: Sequence[float]) -> Point:
        return tuple(int(np.searchsorted(level, h)) for level, h in zip(self.levels, thresholds, strict=True))

    def at_least(self, min_quality: float) -> list[Point]:
        return [tuple(int(i) for i in point) for point in np.argwhere(self.qualities >= min_quality - EPSILON)]

    def groups(self, points: Iterable[Point]) -> list[list[Point]]:
        """Points by which tiers they pass over: those at the last of their levels."""
        groups: dict[tuple[bool, ...], list[Point]] = defaultdict(list)
        for point in points:
            groups[tuple(i == size - 1 for i, size in zip(point, self.shape, strict=True))].append(point)
        return [groups[key] for key in sorted(groups)]

    def starts(self, points: Iterable[Point]) -> list[Point]:
        """Points to begin with, of every group: along the edge where no threshold can be lowered, and by traffic."""
        starts: list[Point] = []
        for group in self.groups(points):
            starts += _evenly(lowest(group)) + _evenly(sorted(group, key=lambda p: (sum(p), p)))
        return list(dict.fromkeys(starts))

    def moves(self, point: Point) -> list[Point]:
        """One threshold up or down by 1, 2, 4, ... levels or to either end; two against each other."""
        powers = range(max(self.shape, default=0).bit_length())
        moves = set[Point]().union(*(_moves_by(1 << power, point, self.shape) for power in powers))
        return sorted(moves - {point})

    def latency_bounds(self, sample: JudgedSample, alone_s: Floats, percentile: float) -> Floats:
        """The slowest tier's latency with each request alone on the fastest replica, for every point: a lower bound.

        sample: the requests that arrive. alone_s (C, N).
        """
        if sample.passed_over is not None or sample.routed:
            return np.zeros(self.shape)  # each tier's percentile is over fewer requests: any latency is possible
        tiers = len(sample.tiers)
        everyone, compared = np.zeros(len(sample)), sample.comparable
        shape = (*self.shape, *([1] * (MOST_TIERS - 1 - len(self.shape))))
        worst = np.zeros(shape)
        for tier in range(tiers):
            below = [compared[:, t] if t < tier else everyone for t in range(MOST_TIERS - 1)]
            first, second = [self.levels[t] if t < tier else np.ones(1) for t in range(MOST_TIERS - 1)]
            members = [
                (s[None, :] < level[:, None]).astype(np.float64)
                for s, level in zip(below, (first, second), strict=True)
            ]
            counts: Ints = np.rint(members[0] @ members[1].T).astype(np.int64)
            slowest = np.argsort(-alone_s[tier], kind="stable")
            of_tier = bounds.percentile_bounds(
                np.array(below), first, second, counts, np.ascontiguousarray(alone_s[tier]), slowest, percentile / 100
            )
            of_tier = np.broadcast_to(of_tier, shape).copy()
            if tier < tiers - 1:  # not asked where it is passed over
                of_tier[(slice(None),) * tier + (-1,)] = 0.0
            worst = np.maximum(worst, of_tier)
        return worst.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Searched:
    """The best point of a search with its value; `gap` is the share of it that another may save, 0 where none can."""

    point: Point
    value: float
    proof: Proof
    gap: float


def search(
    grid: Grid,
    points: Sequence[Point],
    bounds: Floats,
    evaluate: Evaluate,
    most: int | None = None,
    *,
    lightest: bool = False,
) -> Searched | None:
    """The point of `points` with the least value; None where all that were tried are infeasible.

    bounds: of the values, for every point of the grid. evaluate(point, under): the value if it is less, else infinity.
    most: points that are tried of a large grid, about; None for MOST_EVALUATIONS. lightest: of equal bounds, those of less
    quality are tried first, which take less work; else those of more.
    """
    tried: set[Point] = set()
    best: Point | None = None
    best_value = INFEASIBLE

    def attempt(point: Point) -> bool:
        nonlocal best, best_value
        if point in tried or bounds[point] >= best_value:
            return False
        tried.add(point)
        value = evaluate(point, best_value)
        if value >= best_value:
            return False
        best, best_value = point, value
        return True

    sign = 1 if lightest else -1
    by_bound = sorted(points, key=lambda p: (bounds[p], sign * grid.qualities[p], p))
    small = len(points) <= ENUMERATE_UP_TO
    if small:
        for point in by_bound:
            attempt(point)
    else:
        able = set(points)
        for point in grid.starts(points):
            attempt(point)
        upcoming, improved = iter(by_bound), best is not None
        while len(tried) < (MOST_EVALUATIONS if most is None else most):
            while improved and best is not None:
                improved = sum(attempt(move) for move in grid.moves(best) if move in able) > 0  # all of them
            following = next(upcoming, None)
            if following is None or bounds[following] >= best_value:
                break
            improved = attempt(following)
    if best is None:
        return None
    left = min((float(bounds[p]) for p in points if p not in tried), default=INFEASIBLE)
    if small:
        return Searched(best, best_value, Proof.ENUMERATED, 0.0)
    if left >= best_value:
        return Searched(best, best_value, Proof.BOUNDED, 0.0)
    return Searched(best, best_value, Proof.SEARCHED, 1 - left / best_value)


def first_within(
    grid: Grid, points: Sequence[Point], evaluate: Callable[[Point], bool], first: Sequence[Point], most: int
) -> Point | None:
    """The first point that `evaluate` accepts, of at most `most` that are tried; None where none is."""
    order = dict.fromkeys((*first, *grid.starts(points), *points[:: max(1, len(points) // most)]))
    return next((point for point in itertools.islice(order, most) if evaluate(point)), None)


def _moves_by(step: int, point: Point, shape: Sequence[int]) -> set[Point]:
    """One threshold up or down by a step; one up and another down, along the edge of the target; one to either end."""
    moves = {(*point[:t], end, *point[t + 1 :]) for t, n in enumerate(shape) for end in (0, n - 1, n - 2)}
    for t, u, sign in itertools.product(range(len(point)), range(len(point)), (-1, 1)):
        move = list(point)
        move[t] += sign * step
        if u != t:
            move[u] -= sign * step
        moves.add(tuple(min(n - 1, max(0, i)) for i, n in zip(move, shape, strict=True)))
    return moves


def lowest(points: Iterable[Point]) -> list[Point]:
    """Points of one or two coordinates of which no other lies at or below in all, by the first coordinate."""
    edge: list[Point] = []
    for point in sorted(points):
        if not edge or (len(point) > 1 and point[1] < edge[-1][1]):
            edge.append(point)
    return edge


def _evenly(points: Sequence[Point]) -> list[Point]:
    """At most SPREAD of them, the ends included."""
    places = np.unique(np.linspace(0, len(points) - 1, min(SPREAD, len(points))).astype(int))
    return [points[i] for i in places]
