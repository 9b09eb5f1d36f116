"""The bi-level search: thresholds outside, deployment inside (CASCADIA, algorithm 1 and appendix C). No I/O.

Thresholds matter only at the distinct scores of the sample, so they form a finite grid. For up to three tiers its optimum is
found and the way of proof is said:
- ENUMERATED: every combination that meets the target was simulated.
- BOUNDED: a deployment that serves more requests is taken to be no faster. Then only combinations count of which no
  threshold can be lowered, and a stretch of those is discarded when even its least traffic is slower than what is known.
  That holds between combinations that ask the same tiers; each choice of tiers to pass over is searched by itself. What is
  found is then improved by steps of a few levels, since now and then more requests are served faster after all: p95 of
  a few hundred requests hangs on which of them meet in a batch.
- SEARCHED: nothing is proved: beyond three tiers, the paper's penalty and a pattern search from proportional routing and
  from each tier alone, until the best has held for STABLE_ROUNDS rounds; `gap` says how far it may be from the optimum.
"""

import enum
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner_service.deployment.allocation import allocate, solve_milp
from planner_service.deployment.search import INFEASIBLE, LatencyTable, Strategy
from planner_service.routing.quality import (
    SKIPPED,
    JudgedSample,
    all_qualities,
    chebyshev,
    chebyshev_quality,
    proportional,
    route,
)
from planner_service.simulator.tier import Dispatch, Replica
from planner_service.simulator.workload import Floats, Workload

ENUMERATE_UP_TO = 400  # combinations
STABLE_ROUNDS = 3
STEPS_OF_GPUS = 1024  # a tier's count grows by gpus // so many at once: by 1 up to 2,047 GPUs, by 2 from there on
LOOK_AROUND = (1, 2, 4)  # levels
PENALTY = 1e4  # of the whole spread of quality, in seconds: large enough that a plan that meets the target wins
EXCESS_PENALTY = 1e9  # of the whole spread of latency, in points of quality: a ten-millionth of it undoes all quality
EPSILON = 1e-9


class Proof(enum.Enum):
    ENUMERATED = "enumerated"
    BOUNDED = "bounded"
    SEARCHED = "searched"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What one routing leads to: GPUs and strategy of each tier; latency_s, the largest of the tiers'."""

    gpus: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    latency_s: float


@dataclass(frozen=True, slots=True)
class Solution:
    """gap: how much of latency_s (or, under a latency budget, how many points of quality) may be missing to the optimum."""

    thresholds: tuple[float, ...]
    quality: float
    deployment: Deployment
    proof: Proof
    gap: float
    evaluations: int


class Unreachable(Exception):
    """No plan meets the target. `best` is the nearest that can be had: a quality, or a latency in seconds."""

    def __init__(self, message: str, best: float) -> None:
        super().__init__(message)
        self.best = best


class Deployer:
    """The deployment solver under any routing, remembering what it has simulated.

    gpu_step: see deployment.allocation.allocate; where it is above 1, optima are up to the GPUs of a step.
    requests: the sample as it arrives, one per row of `sample`, at `arrival_s` (N, ascending).
    """

    table = LatencyTable  # how l(f) is found

    def __init__(
        self,
        sample: JudgedSample,
        arrival_s: Floats,
        kinds: Sequence[Sequence[Replica]],
        gpus: int,
        *,
        dispatch: Dispatch = Dispatch.CAPACITY,
        percentile: float = 95.0,
        on_evaluation: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.sample, self.gpus, self.dispatch, self.percentile = sample, gpus, dispatch, percentile
        self._arrival_s, self.kinds, self._on_evaluation = arrival_s, kinds, on_evaluation
        self._tables: dict[tuple[int, bytes], LatencyTable] = {}
        self._known: dict[tuple[bytes, ...], Deployment | None] = {}
        self.evaluations = 0
        self.gpu_step = max(1, gpus // STEPS_OF_GPUS)

    def deploy(self, thresholds: Sequence[float]) -> Deployment | None:
        """The best deployment under these thresholds; None where it does not fit the GPUs."""
        processed = route(self.sample, thresholds).processed
        key = tuple(row.tobytes() for row in processed)
        if key not in self._known:
            self.evaluations += 1
            self._on_evaluation(self.evaluations)
            self._known[key] = self._solve([self._table(tier, row) for tier, row in enumerate(processed)])
        return self._known[key]

    def latency_s(self, thresholds: Sequence[float]) -> float:
        found = self.deploy(thresholds)
        return INFEASIBLE if found is None else found.latency_s

    def strategies(self, thresholds: Sequence[float], counts: Sequence[int]) -> tuple[Strategy, ...] | None:
        """The best strategy of each tier on at most so many GPUs; None where a tier that has requests cannot run on its."""
        processed = route(self.sample, thresholds).processed
        found = [self._table(tier, row).best(counts[tier]) for tier, row in enumerate(processed)]
        whole = tuple(s for s in found if s is not None)
        return whole if len(whole) == len(found) else None

    def spread(self, thresholds: Sequence[float]) -> Deployment | None:
        """As deploy, but by the MILP, and with all GPUs given to tiers that have requests (= N, not <= N)."""
        processed = route(self.sample, thresholds).processed
        tables = [self._table(tier, row) for tier, row in enumerate(processed)]
        counts = range(self.gpus + 1)
        rows = [[t.latency_s(f) if t.least_gpus or not f else INFEASIBLE for f in counts] for t in tables]
        found = solve_milp(rows, self.gpus, use_all=True)
        if found is None:
            return None
        strategies = [table.best(f) for table, f in zip(tables, found[0], strict=True)]
        return Deployment(found[0], tuple(s for s in strategies if s is not None), found[1])

    def alone_s(self) -> Floats:
        """(C, N) seconds of each request alone on the fastest replica of each tier; infinite where none fits."""
        everyone = np.ones(len(self.sample), np.bool_)
        tables = [self._table(tier, everyone) for tier in range(len(self.sample.tiers))]
        return np.array([t.alone_s() if t.feasible else np.full(len(everyone), INFEASIBLE) for t in tables])

    @property
    def simulations(self) -> int:
        return sum(table.simulations for table in self._tables.values())

    def workload(self, tier: int, chosen: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> Workload:
        return Workload(
            self._arrival_s[chosen], self.sample.input_tokens[chosen], self.sample.output_tokens[chosen, tier]
        )

    def _table(self, tier: int, chosen: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> LatencyTable:
        key = (tier, chosen.tobytes())
        if key not in self._tables:
            work = self.workload(tier, chosen)
            self._tables[key] = self.table(work, self.kinds[tier], self.dispatch, self.percentile)
        return self._tables[key]

    def _solve(self, tables: list[LatencyTable]) -> Deployment | None:
        if not all(table.feasible for table in tables):
            return None
        found = allocate(
            [table.latency_s for table in tables], [table.least_gpus for table in tables], self.gpus, self.gpu_step
        )
        if found is None:
            return None
        strategies = [table.best(f) for table, f in zip(tables, found[0], strict=True)]
        whole = tuple(s for s in strategies if s is not None)
        return Deployment(tuple(s.gpus for s in whole), whole, found[1]) if len(whole) == len(tables) else None


def least_latency(deployer: Deployer, min_quality: float, judged: JudgedSample | None = None) -> Solution:
    """The routing with the least latency whose mean score over `judged` (else the deployer's sample) is at least min_quality.

    Raises:
        Unreachable: no routing reaches the quality, or none that does fits the GPUs.
    """
    judged = judged or deployer.sample
    if len(judged.tiers) > 3:
        return _searched(deployer, min_quality, judged)
    levels, qualities = all_qualities(judged)
    able = qualities >= min_quality - EPSILON
    if not able.any():
        best = float(qualities.max())
        raise Unreachable(f"no thresholds reach quality {min_quality:g}: the best is {_rounded_down(best)}", best)
    points = [tuple(int(i) for i in point) for point in np.argwhere(able)]

    def thresholds(point: Sequence[int]) -> tuple[float, ...]:
        return tuple(float(levels[t][i]) for t, i in enumerate(point))

    def latency_s(point: tuple[int, ...]) -> float:
        return deployer.latency_s(thresholds(point))

    proof = Proof.ENUMERATED if len(points) <= ENUMERATE_UP_TO else Proof.BOUNDED
    if proof is Proof.BOUNDED:
        best_s, groups = INFEASIBLE, defaultdict(list)
        for point in points:
            groups[skipped(point, qualities.shape)].append(point)
        points = []
        for group in groups.values():
            points.append(_bounded(lowest(group), latency_s, best_s))
            best_s = min(best_s, latency_s(points[-1]))
    best_point = min(points, key=lambda p: (latency_s(p), -qualities[p]))
    while proof is Proof.BOUNDED:  # more traffic is sometimes faster after all: look around
        moves = (p for step in LOOK_AROUND for p in moves_of(best_point, [step] * len(levels), qualities.shape))
        better = min((p for p in moves if able[p]), default=best_point, key=lambda p: (latency_s(p), -qualities[p]))
        if latency_s(better) >= latency_s(best_point):
            break
        best_point = better
    deployment = deployer.deploy(thresholds(best_point))
    if deployment is None:
        raise Unreachable(
            f"no routing of quality {min_quality:g} fits {deployer.gpus} GPUs", float(qualities[best_point])
        )
    quality = float(qualities[best_point])
    return Solution(thresholds(best_point), quality, deployment, proof, 0.0, deployer.evaluations)


def most_quality(deployer: Deployer, max_latency_s: float, judged: JudgedSample | None = None) -> Solution:
    """The routing of the highest quality whose latency is at most `max_latency_s` (appendix C).

    Raises:
        Unreachable: no routing is so fast.
    """
    judged = judged or deployer.sample
    if len(judged.tiers) > 3:
        return _searched_quality(deployer, max_latency_s, judged)
    levels, qualities = all_qualities(judged)
    order = sorted(np.ndindex(qualities.shape), key=lambda p: (-qualities[p], p))
    too_slow: dict[tuple[bool, ...], list[tuple[int, ...]]] = defaultdict(list)
    small = qualities.size <= ENUMERATE_UP_TO
    for point in order:
        group = skipped(point, qualities.shape)
        if not small and any(all(a >= b for a, b in zip(point, slow, strict=True)) for slow in too_slow[group]):
            continue  # at least the traffic of one that is too slow
        thresholds = tuple(float(levels[t][i]) for t, i in enumerate(point))
        deployment = deployer.deploy(thresholds)
        latency = INFEASIBLE if deployment is None else deployment.latency_s
        if deployment is not None and latency <= max_latency_s:
            proof = Proof.ENUMERATED if small else Proof.BOUNDED
            return Solution(thresholds, float(qualities[point]), deployment, proof, 0.0, deployer.evaluations)
        if not small:
            too_slow[group].append(_lowest_too_slow(point, group, levels, deployer, max_latency_s))
    return _fastest_within(deployer, max_latency_s, judged)


def _fastest_within(deployer: Deployer, max_latency_s: float, judged: JudgedSample) -> Solution:
    """The fastest routing of all, which a search for quality within a latency has not found or passed over.

    Raises:
        Unreachable: it is slower than max_latency_s, or no routing fits the GPUs; what is said to be the least can be had.
    """
    try:
        found = least_latency(deployer, 0.0, judged)
    except Unreachable:
        raise Unreachable(f"no routing fits {deployer.gpus} GPUs", INFEASIBLE) from None
    least_s = found.deployment.latency_s
    if least_s <= max_latency_s:
        return found
    raise Unreachable(
        f"no routing has a latency of {max_latency_s:g} s: the least is {_rounded_up(least_s)} s", least_s
    )


def _rounded_up(value: float) -> str:
    """A positive number with four significant digits, never less than it is: a target that is told can be met."""
    scale = 10.0 ** (3 - math.floor(math.log10(value))) if value > 0 else 1.0
    return f"{math.ceil(value * scale) / scale:g}"


def _rounded_down(value: float) -> str:
    """A number with two decimals, never more than it is."""
    return f"{math.floor(value * 100) / 100:g}"


def _lowest_too_slow(
    point: tuple[int, ...],
    skipped: tuple[bool, ...],
    levels: list[Floats],
    deployer: Deployer,
    max_latency_s: float,
) -> tuple[int, ...]:
    """From a point that is too slow, lower each threshold in turn by bisection as far as it stays too slow."""
    low = list(point)
    for t in (t for t in range(len(low)) if not skipped[t]):
        at_least, known = 0, low[t]
        while at_least < known:
            middle = (at_least + known) // 2
            tried = [*low[:t], middle, *low[t + 1 :]]
            if deployer.latency_s([float(levels[i][j]) for i, j in enumerate(tried)]) > max_latency_s:
                known = middle
            else:
                at_least = middle + 1
        low[t] = known
    return tuple(low)


def lowest(points: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Points of one or two coordinates of which no other lies at or below in all, by the first coordinate."""
    found: list[tuple[int, ...]] = []
    for point in sorted(points):
        if not found or (len(point) > 1 and point[1] < found[-1][1]):
            found.append(point)
    return found


def skipped(point: tuple[int, ...], shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Which tiers a point of the grid passes over: those at the last of their levels."""
    return tuple(i == size - 1 for i, size in zip(point, shape, strict=True))


def _bounded(
    points: list[tuple[int, ...]], latency_s: Callable[[tuple[int, ...]], float], known_s: float
) -> tuple[int, ...]:
    """The fastest of points that ascend in the first coordinate and descend in the second, by branch and bound.

    A stretch [i, j] has at least the traffic of the corner (first of i, second of j): its latency bounds the stretch's.
    known_s: what is no faster is of no interest; any point may be returned then.
    """
    best, best_s = points[0], min(known_s, latency_s(points[0]))

    def bound(i: int, j: int) -> float:
        return latency_s((points[i][0], *points[j][1:]))

    heap = [(bound(1, len(points) - 1), 1, len(points) - 1)] if len(points) > 1 else []
    while heap:
        least, i, j = heapq.heappop(heap)
        if least >= best_s:
            break
        middle = (i + j) // 2
        if (now := latency_s(points[middle])) < best_s:
            best, best_s = points[middle], now
        for part in ((i, middle - 1), (middle + 1, j)):
            if part[0] <= part[1] and (least := bound(*part)) < best_s:
                heapq.heappush(heap, (least, *part))
    return best


def _searched(deployer: Deployer, min_quality: float, judged: JudgedSample) -> Solution:
    """Algorithm 1: from proportional routing, steps along one threshold at a time, by J; then half the step."""
    if judged.best < min_quality and judged.worst < min_quality:
        best = float(judged.scores.mean(axis=0).max())
        raise Unreachable(f"no tier alone reaches quality {min_quality:g}: the best has {_rounded_down(best)}", best)
    found, _ = chebyshev_search(deployer, min_quality, judged)
    deployment, quality = deployer.deploy(found), route(judged, found).quality
    if deployment is None or quality < min_quality - EPSILON:
        raise Unreachable(f"no routing of quality {min_quality:g} was found that fits {deployer.gpus} GPUs", quality)
    least = deployer.latency_s([0.0] * len(found))
    gap = max(0.0, 1 - least / deployment.latency_s) if deployment.latency_s else 0.0
    return Solution(found, quality, deployment, Proof.SEARCHED, gap, deployer.evaluations)


def _searched_quality(deployer: Deployer, max_latency_s: float, judged: JudgedSample) -> Solution:
    """The twin of _searched: latency is penalised, between that of the first tier alone and that of the last."""
    ends = [deployer.latency_s([end] * (len(judged.tiers) - 1)) for end in (0.0, SKIPPED)]
    least, most = min(ends), max((end for end in ends if end < INFEASIBLE), default=INFEASIBLE)

    def score(thresholds: Sequence[float]) -> float:
        latency = deployer.latency_s(thresholds)
        return chebyshev_quality(route(judged, thresholds).quality, latency, max_latency_s, least, most, EXCESS_PENALTY)

    found, _ = _pattern_search(judged, score)
    deployment, quality = deployer.deploy(found), route(judged, found).quality
    if deployment is None or deployment.latency_s > max_latency_s:
        return _fastest_within(deployer, max_latency_s, judged)
    gap = float(judged.scores.max(axis=1).mean()) - quality  # to the best answer to every prompt
    return Solution(found, quality, deployment, Proof.SEARCHED, gap, deployer.evaluations)


def chebyshev_search(deployer: Deployer, min_quality: float, judged: JudgedSample) -> tuple[tuple[float, ...], float]:
    """(thresholds, J) of the paper's loop with a pattern search as its routing solver."""

    def score(thresholds: Sequence[float]) -> float:
        latency = deployer.latency_s(thresholds)
        return chebyshev(latency, route(judged, thresholds).quality, min_quality, judged.best, judged.worst, PENALTY)

    return _pattern_search(judged, score)


def _pattern_search(judged: JudgedSample, score: Callable[[Sequence[float]], float]) -> tuple[tuple[float, ...], float]:
    """(thresholds, the least score found), from proportional routing and from each tier alone."""
    levels = [judged.levels(tier) for tier in range(len(judged.tiers) - 1)]

    def thresholds(at: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(float(levels[t][i]) for t, i in enumerate(at))

    sizes = [len(level) for level in levels]
    start = tuple(int(np.searchsorted(level, h)) for level, h in zip(levels, proportional(judged), strict=True))
    # and from each tier alone: what is passed over and what is not are far apart
    alone = [tuple(0 if t == tier else size - 1 for t, size in enumerate(sizes)) for tier in range(len(judged.tiers))]
    best, at = min(_descend(lambda at: score(thresholds(at)), begin, sizes) for begin in (start, *alone))
    return thresholds(at), best


def _descend(
    score: Callable[[tuple[int, ...]], float], at: tuple[int, ...], sizes: Sequence[int]
) -> tuple[float, tuple[int, ...]]:
    """(the least score found, where): the best of all moves, halving the steps where none is better."""
    best = score(at)
    steps = [max(1, size // 4) for size in sizes]
    stable = 0
    while stable < STABLE_ROUNDS or max(steps) > 1:
        now, moved = min((score(move), move) for move in moves_of(at, steps, sizes))
        if now < best:
            best, at, stable = now, moved, 0
        else:
            stable += 1
            steps = [max(1, step // 2) for step in steps]
    return best, at


def moves_of(at: tuple[int, ...], steps: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """One threshold up or down; one up and another down, along the edge of the target; one to either end."""
    found = {(*at[:t], end, *at[t + 1 :]) for t, size in enumerate(sizes) for end in (0, size - 1, size - 2)}
    for t, u in itertools.product(range(len(at)), repeat=2):
        for sign in (-1, 1):
            move = list(at)
            move[t] += sign * steps[t]
            if u != t:
                move[u] -= sign * steps[u]
            found.add(tuple(min(size - 1, max(0, i)) for i, size in zip(move, sizes, strict=True)))
    return sorted(found)
