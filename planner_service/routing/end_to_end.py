"""The other objective: what a user feels, p95 over all tiers a request visits and judging. No I/O.

The deployment of the largest-tier objective says nothing about tiers that are not the slowest, and every tier that a request
passes adds to its time. From that optimum, and from each choice of tiers to pass over, a local search moves GPUs between
tiers (and spare ones to a tier) and thresholds by a few levels, always simulating the whole cascade from end to end, until no
move helps. Nothing is proved beyond that; the gap is to what no plan of that quality can beat: each request alone on the
fastest replica of every tier it visits, and judged.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner_service.deployment.search import Strategy
from planner_service.routing.bilevel import (
    LOOK_AROUND,
    Deployer,
    Deployment,
    Proof,
    Solution,
    lowest,
    moves_of,
    skipped,
)
from planner_service.routing.quality import JudgedSample, all_qualities, route
from planner_service.simulator.workload import Floats

TotalSeconds = Callable[[Sequence[float], Sequence[Strategy]], float]
_Point = tuple[int, ...]


def least_end_to_end(
    deployer: Deployer, judged: JudgedSample, min_quality: float, start: Solution, total_s: TotalSeconds, judge_s: float
) -> Solution:
    """A routing and deployment of at least min_quality with a small end-to-end p95; latency_s stays the largest tier's.

    total_s: (thresholds, strategies) to seconds from arrival to final answer at the percentile wanted. judge_s: part of it.
    """
    levels, qualities = all_qualities(judged)
    able = qualities >= min_quality - 1e-9
    known: dict[tuple[_Point, tuple[int, ...]], float] = {}

    def thresholds(point: _Point) -> tuple[float, ...]:
        return tuple(float(levels[t][i]) for t, i in enumerate(point))

    def seconds(point: _Point, counts: tuple[int, ...]) -> float:
        key = (point, counts)
        if key not in known:
            strategies = deployer.strategies(thresholds(point), counts)
            known[key] = float("inf") if strategies is None else total_s(thresholds(point), strategies)
        return known[key]

    def descend(point: _Point, counts: tuple[int, ...]) -> tuple[float, _Point, tuple[int, ...]]:
        now = seconds(point, counts)
        while True:
            nearby = itertools.chain(
                ((point, c) for c in _shifts(counts, deployer.gpus)),
                (
                    (p, counts)
                    for s in LOOK_AROUND
                    for p in moves_of(point, [s] * len(levels), qualities.shape)
                    if able[p]
                ),
            )
            best, at = min((seconds(*move), move) for move in nearby)
            if best >= now:
                return now, point, counts
            now, (point, counts) = best, at

    starts = {tuple(int(np.searchsorted(level, h)) for level, h in zip(levels, start.thresholds, strict=True))}
    groups = defaultdict(list)  # for each choice of tiers: the least that escalates
    for point in map(tuple, np.argwhere(able).tolist()):
        groups[skipped(point, qualities.shape)].append(point)
    starts |= {min(group, key=sum) for group in groups.values()}
    found = []
    for point in sorted(starts):
        deployment = deployer.deploy(thresholds(point))
        if deployment is not None:
            found.append(descend(point, deployment.gpus))
    best_s, point, counts = min(found)
    strategies = deployer.strategies(thresholds(point), counts)
    assert strategies is not None
    deployment = Deployment(
        tuple(s.gpus for s in strategies), strategies, max(strategy.latency_s for strategy in strategies)
    )
    alone_s = deployer.alone_s()
    bound = min(
        _alone_percentile(deployer, alone_s, judge_s, thresholds(p)) for group in groups.values() for p in lowest(group)
    )
    return dataclasses.replace(
        start,
        thresholds=thresholds(point),
        quality=float(qualities[point]),
        deployment=deployment,
        proof=Proof.SEARCHED,
        gap=max(0.0, 1 - bound / best_s) if best_s > 0 else 0.0,
        evaluations=deployer.evaluations,
    )


def _alone_percentile(deployer: Deployer, alone_s: Floats, judge_s: float, thresholds: Sequence[float]) -> float:
    """What no deployment under these thresholds can beat: every request alone on the fastest replica of each tier it visits.

    Where no threshold is lower and the same tiers are asked, each request visits as many tiers or more: the least of this
    over the lowest routings bounds them all.
    """
    processed = route(deployer.sample, thresholds).processed
    each_s = alone_s + judge_s * (np.arange(len(alone_s)) < len(alone_s) - 1)[:, None]
    return float(np.percentile(np.where(processed, each_s, 0.0).sum(axis=0), deployer.percentile))


def _shifts(counts: tuple[int, ...], gpus: int) -> Iterator[tuple[int, ...]]:
    """Some GPUs from one tier, or from those that are spare, to another: a power of two, up to a quarter of all."""
    amounts = [1 << i for i in range(max(1, (gpus // 4).bit_length()))]
    for amount, to in itertools.product(amounts, range(len(counts))):
        if sum(counts) + amount <= gpus:
            yield tuple(c + amount if t == to else c for t, c in enumerate(counts))
        for giver in range(len(counts)):
            if giver != to and counts[giver] >= amount:
                yield tuple(c + amount if t == to else c - amount if t == giver else c for t, c in enumerate(counts))
