"""How many GPUs each tier gets, so that the slowest tier is as fast as can be. No I/O.

Sets: tiers i = 1..C, GPU counts f = 0..N. Given: l_i(f), non-increasing in f, infinite where tier i cannot run on f GPUs.
Variables: x[i,f] in {0,1}, L >= 0.   Objective: minimise L (CASCADIA, section 3.2).
(i)   sum_f x[i,f] = 1 for every tier.
(ii)  sum_i sum_f f x[i,f] <= N (appendix D).
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

from penstock.planner_service.deployment.search import LatencyTable
from penstock.services.domain.shares import apportioned

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
    least, work = [table.least_gpus for table in tables], [table.gpu_s for table in tables]
    spare = gpus - sum(least)
    if spare < 0 or sum(work) <= 0:
        return None
    return [some + more for some, more in zip(least, apportioned(spare, work), strict=True)]


def every_split(tables: Sequence[LatencyTable], gpus: int) -> Iterator[list[int]]:
    """All GPUs, shared out over the tiers in every way, in SPLIT_UNITS units; none where there are over SPLIT_MOST."""
    used = [tier for tier, table in enumerate(tables) if table.least_gpus] if gpus <= SPLIT_MOST else []
    unit = -(-gpus // SPLIT_UNITS)
    for at in itertools.combinations(range(unit, gpus, unit), len(used) - 1) if used else ():
        counts = dict(zip(used, np.diff([0, *at, gpus]).tolist(), strict=True))
        yield [counts.get(tier, 0) for tier in range(len(tables))]
