"""The bi-level search: thresholds outside, deployment inside (CASCADIA, algorithm 1 and appendix C). No I/O.

Latency here is that of the slowest tier (the paper's L); `routing.end_to_end` has what a user feels. The routings are a
grid (`routing.grid`).

What tiers sustain is an estimate while a search runs. Where its solution does not sustain the rate, it is searched again,
and each strategy of the tiers that are over is verified (`sustaining`).
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

import numpy as np

from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.grid import (
    INFEASIBLE,
    MOST_EVALUATIONS,
    Grid,
    Point,
    Searched,
    first_within,
    search,
)
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.routing.solution import Proof, Solution, Unreachable, too_poor, too_slow
from penstock.planner_service.simulator.workload import Floats

MOST_TRIED = 100  # routings that a search for the highest rate tries at each

_Args = ParamSpec("_Args")


def sustaining(deployer: Deployer, solve: Callable[[], Solution]) -> Solution:
    """What `solve` finds; as long as that does not sustain the rate, once more, with the tiers verified that do not.

    Strategies are only ever left out by that, so the best of those that are left is the best of all that sustain the rate,
    as soon as it does so itself. It is searched at most once more for each tier.
    """
    while True:
        solution = solve()
        plan = solution.thresholds, solution.deployment.strategies
        if deployer.sustains(*plan):
            return solution
        deployer.verify(*plan)


def sustained(
    search: Callable[Concatenate[Deployer, _Args], Solution],
) -> Callable[Concatenate[Deployer, _Args], Solution]:
    """The search, whose solution sustains the rate; see `sustaining`."""

    @functools.wraps(search)
    def searched(deployer: Deployer, /, *args: _Args.args, **kwargs: _Args.kwargs) -> Solution:
        return sustaining(deployer, lambda: search(deployer, *args, **kwargs))

    return searched


def begin_of_least_latency(
    deployer: Deployer, min_quality: float, judged: JudgedSample | None = None, most: int | None = None
) -> Solution:
    """The routing with the least latency whose mean quality over `judged` (or the deployer's sample) is at least min_quality.

    That it sustains the rate is only estimated: for a search that begins there. most: routings that are tried of a large
    grid, see grid.search.

    Raises:
        Unreachable: no routing reaches the quality, or none that does fits the GPUs and sustains the rate.
    """
    judged = judged or deployer.sample
    grid, points = _able(judged, min_quality)

    def evaluate(point: Point, under: float) -> float:
        thresholds = grid.thresholds(point)
        if under < INFEASIBLE and deployer.cost_within(thresholds, math.nextafter(under, 0.0)) == INFEASIBLE:
            return INFEASIBLE
        return deployer.latency_s(thresholds)

    result = search(grid, points, latency_bounds(deployer, grid), evaluate, most)
    if result is None:
        raise no_deployment(
            deployer, f"no routing of quality {min_quality:g}", float(max(grid.qualities[p] for p in points))
        )
    return _solution(deployer, grid, result, gap=max(result.gap, deployer.tolerance))


least_latency = sustained(begin_of_least_latency)
"""As begin_of_least_latency, of routings that sustain the rate."""


def least_work(deployer: Deployer, min_quality: float, judged: JudgedSample, most: int) -> tuple[float, ...]:
    """Thresholds of the routing that costs least with replicas always busy, for a search for the cheapest that begins there;
    nothing is simulated.

    most: routings that are tried of a large grid, see grid.search.

    Raises:
        Unreachable: no routing reaches the quality.
    """
    grid, points = _able(judged, min_quality)
    costs_s = deployer.tier_costs_s

    def evaluate(point: Point, _under: float) -> float:
        shares = route(judged, grid.thresholds(point)).processed.mean(axis=1)
        return float(np.dot(costs_s[shares > 0], shares[shares > 0]))

    result = search(grid, points, np.zeros(grid.shape), evaluate, most, lightest=True)
    return grid.thresholds(points[0] if result is None else result.point)


@sustained
def cheapest(
    deployer: Deployer,
    min_quality: float,
    max_latency_s: float,
    judged: JudgedSample | None = None,
    most: int | None = None,
) -> Solution:
    """The routing and deployment of the least cost that meet both targets, and sustain the rate.

    most: routings that are tried of a large grid, see grid.search.

    Raises:
        Unreachable: no routing reaches the quality, or none that does is so fast on the deployer's GPUs.
    """
    judged = judged or deployer.sample
    grid, points = _able(judged, min_quality)
    bounds = np.where(latency_bounds(deployer, grid) > max_latency_s, INFEASIBLE, deployer.least_cost)

    def evaluate(point: Point, under: float) -> float:
        return deployer.cost_within(grid.thresholds(point), max_latency_s, under)

    points = [p for p in points if bounds[p] < INFEASIBLE]
    result = search(grid, points, bounds, evaluate, most, lightest=True) if points else None
    if result is None:
        raise _too_slow(deployer, min_quality, max_latency_s, judged)
    thresholds = grid.thresholds(result.point)
    deployment = deployer.cheapest_within(thresholds, max_latency_s)
    assert deployment is not None
    gap = 0.0 if result.proof is not Proof.SEARCHED else None
    quality = float(grid.qualities[result.point])
    return Solution(thresholds, quality, deployment, result.proof, gap, deployer.evaluations)


def begin_within(
    deployer: Deployer,
    min_quality: float,
    max_latency_s: float,
    judged: JudgedSample,
    begin: Sequence[Sequence[float]] = (),
) -> Solution:
    """A plan that meets both targets, not the best of them. That it sustains the rate is only estimated: for a search that
    begins there.

    begin: thresholds to try first, as of a plan for a lower rate.

    Raises:
        Unreachable: none of MOST_TRIED routings does.
    """
    grid, points = _able(judged, min_quality)
    bounds = latency_bounds(deployer, grid)
    able = [p for p in points if bounds[p] <= max_latency_s]

    def fits(point: Point) -> bool:
        return deployer.cost_within(grid.thresholds(point), max_latency_s) < INFEASIBLE

    point = first_within(grid, able, fits, [p for p in map(grid.nearest, begin) if p in able], MOST_TRIED)
    if point is None:
        within = f"{deployer.latency_words} is at most {max_latency_s:g} s on {deployer.gpus} GPUs"
        raise too_slow(f"no routing of quality {min_quality:g} was found whose {within}", INFEASIBLE)
    return _solution(deployer, grid, Searched(point, 0.0, Proof.SEARCHED, 1.0), gap=None)


any_within = sustained(begin_within)
"""As begin_within, of plans that sustain the rate: what a search for the highest rate tries at each."""


@sustained
def most_quality(deployer: Deployer, max_latency_s: float, judged: JudgedSample | None = None) -> Solution:
    """The routing of the highest quality whose latency is at most `max_latency_s` (appendix C).

    Routings are tried from the highest quality down. After MOST_EVALUATIONS, those are passed over that send at least
    the traffic of one that was too slow: likely no faster, which is no proof.

    Raises:
        Unreachable: no routing is so fast.
    """
    judged = judged or deployer.sample
    grid = Grid(judged)
    bounds = latency_bounds(deployer, grid)
    points = [p for p in grid.at_least(-1.0) if bounds[p] <= max_latency_s]
    points.sort(key=lambda p: (-grid.qualities[p], p))
    too_slow: dict[tuple[bool, ...], list[Point]] = defaultdict(list)
    tried, passed_over = 0, None
    for point in points:
        group = tuple(i == size - 1 for i, size in zip(point, grid.shape, strict=True))
        assume = tried >= MOST_EVALUATIONS
        if assume and any(all(a >= b for a, b in zip(point, slow, strict=True)) for slow in too_slow[group]):
            passed_over = point if passed_over is None else passed_over
            continue
        tried += 1
        if deployer.cost_within(grid.thresholds(point), max_latency_s) < INFEASIBLE:
            deployment = deployer.deploy(grid.thresholds(point))
            assert deployment is not None
            proof = Proof.ENUMERATED if len(points) == grid.qualities.size else Proof.BOUNDED
            quality, gap = float(grid.qualities[point]), 0.0
            if passed_over is not None:
                proof, gap = Proof.SEARCHED, float(grid.qualities[passed_over]) - quality
            return Solution(grid.thresholds(point), quality, deployment, proof, gap, deployer.evaluations)
        too_slow[group].append(_lowest_too_slow(point, group, grid, deployer, max_latency_s) if assume else point)
    return _fastest_within(deployer, max_latency_s, judged)


def latency_bounds(deployer: Deployer, grid: Grid) -> Floats:
    return grid.latency_bounds(deployer.sample, deployer.alone_s(), deployer.percentile)


def _able(judged: JudgedSample, min_quality: float) -> tuple[Grid, list[Point]]:
    grid = Grid(judged)
    points = grid.at_least(min_quality)
    if not points:
        best = float(grid.qualities.max())
        raise too_poor(f"no thresholds reach quality {min_quality:g}: the best is {rounded_down(best)}", best)
    return grid, points


def _solution(deployer: Deployer, grid: Grid, result: Searched, *, gap: float | None) -> Solution:
    thresholds = grid.thresholds(result.point)
    deployment = deployer.deploy(thresholds)
    assert deployment is not None
    quality = float(grid.qualities[result.point])
    return Solution(thresholds, quality, deployment, result.proof, gap, deployer.evaluations)


def no_deployment(deployer: Deployer, what: str, best: float) -> Unreachable:
    """That nothing fits the GPUs. best: the quality that was reached."""
    sustains = " and sustains the rate" if deployer.max_utilisation is not None else ""
    return Unreachable(f"{what} fits {deployer.gpus} GPUs{sustains}", best)


def _too_slow(deployer: Deployer, min_quality: float, max_latency_s: float, judged: JudgedSample) -> Unreachable:
    """That no routing of the quality is so fast; Unreachable is raised where none fits the GPUs at all."""
    least_s = least_latency(deployer, min_quality, judged).deployment.latency_s
    within = f"a {deployer.latency_words} of {max_latency_s:g} s on {deployer.gpus} GPUs"
    why = f"no routing of quality {min_quality:g} has {within}: the least is {rounded_up(least_s)} s"
    return too_slow(why, least_s)


def _fastest_within(deployer: Deployer, max_latency_s: float, judged: JudgedSample) -> Solution:
    """The fastest routing of all, which a search for quality within a latency has not found or passed over.

    Raises:
        Unreachable: it is slower than max_latency_s, or no routing fits the GPUs; what is said to be the least can be had.
    """
    fastest = least_latency(deployer, 0.0, judged)
    least_s = fastest.deployment.latency_s
    if least_s <= max_latency_s:
        return fastest
    why = f"no routing has a {deployer.latency_words} of {max_latency_s:g} s: the least is {rounded_up(least_s)} s"
    raise too_slow(why, least_s)


def rounded_up(value: float) -> str:
    """A positive number with four significant digits, never less than it is: a target of that size can be met."""
    scale = 10.0 ** (3 - math.floor(math.log10(value))) if value > 0 else 1.0
    return f"{math.ceil(value * scale) / scale:g}"


def rounded_down(value: float) -> str:
    """A number with two decimals, never more than it is."""
    return f"{math.floor(value * 100) / 100:g}"


def _lowest_too_slow(
    point: Point, passed_over: tuple[bool, ...], grid: Grid, deployer: Deployer, max_latency_s: float
) -> Point:
    """From a point that is too slow, lower each threshold in turn by bisection as far as it stays too slow."""
    low = list(point)
    for t in (t for t in range(len(low)) if not passed_over[t]):
        at_least, known = 0, low[t]
        while at_least < known:
            middle = (at_least + known) // 2
            tried = [*low[:t], middle, *low[t + 1 :]]
            if deployer.cost_within(grid.thresholds(tried), max_latency_s) == INFEASIBLE:
                known = middle
            else:
                at_least = middle + 1
        low[t] = known
    return tuple(low)
