"""How many GPUs each tier gets, so that the slowest tier is as fast as can be. No I/O.

Sets: tiers i = 1..C, GPU counts f = 0..N. Given: l_i(f), non-increasing in f, infinite where tier i cannot run on f GPUs.
Variables: x[i,f] in {0,1}, L >= 0.   Objective: minimise L (CASCADIA, section 3.2).
(i)   sum_f x[i,f] = 1 for every tier.
(ii)  sum_i sum_f f x[i,f] <= N (appendix D), or = N (main text).
(iii) L >= sum_f l_i(f) x[i,f] for every tier.
(iv)  x[i,f] = 0 where l_i(f) is infinite.

`allocate` solves the same problem without a table of all l_i(f): it raises the slowest tier to the next count that makes it
faster until the GPUs are used up. That is exact: whatever beats the largest latency reached must give that tier at least
so many GPUs, and every tier has the fewest with which the bound so far could be met.
"""

import bisect
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array


def allocate(
    latency: Sequence[Callable[[int], float]], least: Sequence[int], gpus: int, steps: Sequence[int]
) -> tuple[tuple[int, ...], float] | None:
    """(GPUs of each tier, L); None where not all tiers fit. `least`: the fewest GPUs tier i can run on.

    steps: the counts at which latencies may change, ascending. Among the optima, the one with the fewest GPUs.
    """
    counts = list(least)
    if sum(counts) > gpus:
        return None
    seconds = [tier(f) for tier, f in zip(latency, counts, strict=True)]
    while True:
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        most = counts[slowest] + gpus - sum(counts)
        more = steps[bisect.bisect_right(steps, counts[slowest]) : bisect.bisect_right(steps, most)]
        better = next((f for f in more if latency[slowest](f) < seconds[slowest]), None)
        if better is None:
            return tuple(counts), seconds[slowest]
        counts[slowest], seconds[slowest] = better, latency[slowest](better)


def solve_milp(
    tables: Sequence[Sequence[float]], gpus: int, *, use_all: bool = False
) -> tuple[tuple[int, ...], float] | None:
    """(GPUs of each tier, L) by HiGHS; tables[i][f] is l_i(f) for f = 0..N. None where infeasible.

    use_all: (ii) with equality. Then among the optima, the one with the least sum of latencies: GPUs that cannot help the
    slowest tier help the others.
    """
    places = [(i, f) for i, table in enumerate(tables) for f in range(gpus + 1) if np.isfinite(table[f])]
    if {i for i, _ in places} != set(range(len(tables))):
        return None
    seconds = [tables[i][f] for i, f in places]
    result = _solve(places, seconds, gpus, use_all=use_all, sum_of_latencies=False)
    if result is None:
        return None
    slowest = max(tables[i][f] for i, f in enumerate(result))
    if use_all:
        remaining = [(place, s) for place, s in zip(places, seconds, strict=True) if s <= slowest]
        fast_places, fast_s = [p for p, _ in remaining], [s for _, s in remaining]
        result = _solve(fast_places, fast_s, gpus, use_all=True, sum_of_latencies=True) or result
    return result, slowest


def _solve(
    places: list[tuple[int, int]], seconds: list[float], gpus: int, *, use_all: bool, sum_of_latencies: bool
) -> tuple[int, ...] | None:
    """The chosen f of each tier. Variables: x of every place (i, f), then L."""
    n, tiers = len(places), 1 + max(i for i, _ in places)
    one = csr_array((np.ones(n), ([i for i, _ in places], range(n))), shape=(tiers, n + 1))
    budget = np.array([float(f) for _, f in places] + [0.0])
    slack = np.zeros((tiers, n + 1))
    slack[[i for i, _ in places], range(n)] = [-s for s in seconds]
    slack[:, n] = 1.0
    result = milp(
        np.array([*seconds, 0.0] if sum_of_latencies else [0.0] * n + [1.0]),
        integrality=np.array([1] * n + [0]),
        bounds=Bounds(np.zeros(n + 1), np.array([1.0] * n + [np.inf])),
        constraints=[
            LinearConstraint(one, 1.0, 1.0),
            LinearConstraint(budget[None, :], float(gpus) if use_all else 0.0, float(gpus)),
            LinearConstraint(slack, 0.0, np.inf),
        ],
    )
    if result.x is None:
        return None
    counts = [0] * tiers
    for (i, f), x in zip(places, result.x[:n], strict=True):
        if x > 0.5:
            counts[i] = f
    return tuple(counts)
