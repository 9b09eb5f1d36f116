"""How many GPUs each tier gets, so that the slowest tier is as fast as can be. No I/O.

Sets: tiers i = 1..C, GPU counts f = 0..N. Given: l_i(f), non-increasing in f, infinite where tier i cannot run on f GPUs.
Variables: x[i,f] in {0,1}, L >= 0.   Objective: minimise L (CASCADIA, section 3.2).
(i)   sum_f x[i,f] = 1 for every tier.
(ii)  sum_i sum_f f x[i,f] <= N (appendix D), or = N (main text).
(iii) L >= sum_f l_i(f) x[i,f] for every tier.
(iv)  x[i,f] = 0 where l_i(f) is infinite.

`allocate` solves the same problem without a table of all l_i(f): it asks for the fewest GPUs of each tier with which no
tier is slower than a limit, and lowers the limit below what it finds until they are too many. That is exact: each tier
needs its own GPUs, so whatever is faster takes at least the fewest of each. A limit that is known to be reachable is a
start that spares the slower ones.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from penstock.planner_service.deployment.search import LatencyTable

SPLIT_UNITS, SPLIT_MOST = 16, 128
"""All ways to share GPUs out are tried in so many units, where there are at most so many GPUs: three tiers have 105."""

ANY_S = sys.float_info.max  # a limit that every latency is within


def allocate(
    within: Callable[[float], Sequence[int] | None],
    latency_s: Callable[[Sequence[int]], float],
    reachable_s: float = ANY_S,
) -> tuple[tuple[int, ...], float] | None:
    """(GPUs of each tier, L); None where not all tiers fit. Among the optima, the one with the fewest GPUs.

    within(limit): the fewest GPUs of each tier with which its latency is at most the limit; None where these are too many.
    latency_s(counts): of the slowest tier on so many. reachable_s: an L that is known to be reachable, if there is any.
    """
    best, limit_s = None, reachable_s
    while (counts := within(limit_s)) is not None:
        best = tuple(counts), latency_s(counts)
        if best[1] <= 0.0:
            break  # nothing is faster
        limit_s = math.nextafter(best[1], 0.0)
    return best


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


def fewest_within(tables: Sequence[LatencyTable], limit_s: float, gpus: int) -> list[int] | None:
    """The fewest GPUs of each tier with which its latency is within limit_s; None where that takes more than `gpus`.

    A tier's latency depends on its own GPUs alone, so the fewest of each are the fewest of all. tables: of tiers that can be
    served.
    """
    least = [table.fewest_known(limit_s) for table in tables]
    left, counts = gpus - sum(least), [0] * len(tables)
    if left < 0:
        return None
    for tier in sorted(range(len(tables)), key=lambda i: -least[i]):  # the dearest are the most likely to fail
        count = tables[tier].least_gpus_within(limit_s, least[tier] + left)
        if count is None:
            return None
        counts[tier] = count
        left -= count - least[tier]
    return counts


def in_proportion(tables: Sequence[LatencyTable], gpus: int) -> list[int] | None:
    """All GPUs, in proportion to the work of each tier (largest remainder); None where that does not serve all."""
    least, work = np.array([table.least_gpus for table in tables]), np.array([table.gpu_s for table in tables])
    spare = gpus - int(least.sum())
    if spare < 0 or work.sum() <= 0:
        return None
    shares = spare * work / work.sum()
    counts = np.floor(shares).astype(int)
    for tier in np.argsort(counts - shares, kind="stable")[: spare - int(counts.sum())]:
        counts[tier] += 1
    return list(map(int, least + counts))


def every_split(tables: Sequence[LatencyTable], gpus: int) -> Iterator[list[int]]:
    """All GPUs, shared out over the tiers in every way, in SPLIT_UNITS units; none where there are over SPLIT_MOST."""
    used = [tier for tier, table in enumerate(tables) if table.least_gpus] if gpus <= SPLIT_MOST else []
    unit = -(-gpus // SPLIT_UNITS)
    for at in itertools.combinations(range(unit, gpus, unit), len(used) - 1) if used else ():
        counts = dict(zip(used, np.diff([0, *at, gpus]).tolist(), strict=True))
        yield [counts.get(tier, 0) for tier in range(len(tables))]
