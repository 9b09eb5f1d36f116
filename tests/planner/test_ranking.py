"""The compiled ranking of replica mixes and the split of a budget, each against a plain enumeration."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner_service.deployment import ranking
from penstock.planner_service.deployment.allocation import allocate
from penstock.planner_service.simulator.workload import Floats


def test_the_most_promising_pairs_are_those_of_a_full_enumeration() -> None:
    rng = np.random.default_rng(5)
    for _ in range(30):
        sizes = np.sort(rng.choice([1, 2, 3, 4, 6, 8], 4, replace=False))
        capacity, alone, rate = rng.uniform(0.5, 3, 4) * sizes, rng.uniform(1, 4, 4), float(rng.uniform(1, 30))
        gpus, most, keep = int(rng.integers(2, 30)), int(rng.integers(1, 20)), int(rng.integers(1, 9))

        def estimate(
            parts: list[tuple[int, int]], capacity: Floats = capacity, alone: Floats = alone, rate: float = rate
        ) -> float:
            total = sum(capacity[k] * n for k, n in parts)
            return float(ranking.estimate_s(total, sum(capacity[k] * n * alone[k] for k, n in parts), rate, 20.0))

        every = [
            (estimate([(i, n), (j, m)]), (i, n, j, m))
            for i, j in itertools.combinations(range(4), 2)
            for n in range(1, min(most, gpus // sizes[i]) + 1)
            for m in [(gpus - n * sizes[i]) // sizes[j]]
            if m > 0 and gpus - n * sizes[i] - m * sizes[j] < sizes[i]
        ]
        every.sort(key=lambda one: one[0])
        found = ranking.promising_pairs(ranking.Kinds(sizes, capacity, alone, rate, 20.0), gpus, most, keep)
        assert [tuple(row) for row in found.tolist()] == [parts for _, parts in every[:keep]]


def test_kinds_that_are_passed_over_are_not_among_the_most_promising() -> None:
    """A few rows are the first of all rows, ties included: with room for all rows, no kind is passed over."""
    rng = np.random.default_rng(7)
    for _ in range(60):
        kinds = int(rng.integers(3, 11))
        sizes = rng.choice([1, 2, 3, 4, 6, 8, 16, 32], kinds)
        capacity, alone = rng.integers(1, 5, kinds) * 0.3 * sizes, (rng.integers(1, 12, kinds) * 0.5).astype(np.float64)
        gpus, most = int(rng.integers(3, 300)), int(rng.integers(1, 400))
        rate = float(capacity.max() / sizes[capacity.argmax()] * gpus * rng.uniform(0.1, 1.3))
        of = ranking.Kinds(sizes, capacity, alone, rate, 20.0)
        few, all_rows = (ranking.promising_pairs(of, gpus, most, keep) for keep in (6, 30_000))
        np.testing.assert_array_equal(few, all_rows[:6])


INF = math.inf


def brute_force(tables: list[list[float]], gpus: int) -> float:
    """The least of the largest latencies over every split of the GPUs."""
    splits = (c for c in itertools.product(range(gpus + 1), repeat=len(tables)) if sum(c) <= gpus)
    return min((slowest(tables, counts) for counts in splits), default=INF)


@st.composite
def tables(draw: st.DrawFn) -> list[list[float]]:
    """l_i(f) for f = 0..N, non-increasing, infinite up to some f; a tier without traffic needs none."""
    gpus = draw(st.integers(1, 8))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        least = draw(st.integers(0, gpus))
        values = draw(st.lists(st.integers(0, 12), min_size=gpus + 1 - least, max_size=gpus + 1 - least))
        found.append([INF] * least + [float(v) for v in sorted(values, reverse=True)])
    return found


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(tables())
def test_allocation_finds_the_optimum(found: list[list[float]]) -> None:
    gpus = len(found[0]) - 1
    best = brute_force(found, gpus)
    reachable = [] if best == INF else [{}, {"reachable_s": best}, {"reachable_s": best + 1.0}]
    for start in reachable or [{}]:
        lazy = allocate(lambda limit_s: fewest(found, gpus, limit_s), lambda counts: slowest(found, counts), **start)
        assert (lazy is None) == (best == INF)
        if lazy is not None:
            assert lazy[1] == best == slowest(found, lazy[0])
            every = itertools.product(range(gpus + 1), repeat=len(found))
            assert sum(lazy[0]) == min(sum(c) for c in every if sum(c) <= gpus and slowest(found, c) == best)


def test_a_limit_that_is_reachable_spares_the_slower_ones() -> None:
    """What is asked is the limit that is known, and then only what is under it."""
    found, asked = [[INF, *(100.0 * (t + 1) / f for f in range(1, 65))] for t in range(3)], list[float]()

    def within(limit_s: float) -> list[int] | None:
        asked.append(limit_s)
        return fewest(found, 64, limit_s)

    everything = allocate(within, lambda counts: slowest(found, counts))
    from_any, reachable_s = len(asked), 1.1 * brute_force_of_shares(found)
    asked.clear()
    assert allocate(within, lambda counts: slowest(found, counts), reachable_s) == everything
    assert len(asked) < from_any / 4
    assert max(asked) == reachable_s


def fewest(tables: list[list[float]], gpus: int, limit_s: float) -> list[int] | None:
    """The fewest GPUs of each tier with which it is within the limit; None where they are more than there are."""
    counts = [next((f for f, s in enumerate(table) if s <= limit_s), gpus + 1) for table in tables]
    return counts if sum(counts) <= gpus else None


def slowest(tables: list[list[float]], counts: Sequence[int]) -> float:
    return max(table[f] for table, f in zip(tables, counts, strict=True))


def brute_force_of_shares(tables: list[list[float]]) -> float:
    """brute_force for three tiers and the last count of their tables."""
    gpus = len(tables[0]) - 1
    pairs = itertools.product(range(1, gpus), repeat=2)
    return min(slowest(tables, (a, b, gpus - a - b)) for a, b in pairs if a + b < gpus)
