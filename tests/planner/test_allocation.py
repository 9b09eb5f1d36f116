"""GPU allocation: the water-filling, the MILP and brute force agree on every instance."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_service.deployment.allocation import allocate, solve_milp

INF = math.inf


def brute_force(tables: list[list[float]], gpus: int, *, use_all: bool) -> float:
    """The least of the largest latencies over every split of the GPUs."""
    best = INF
    for counts in itertools.product(range(gpus + 1), repeat=len(tables)):
        if sum(counts) == gpus or (not use_all and sum(counts) < gpus):
            best = min(best, max(table[f] for table, f in zip(tables, counts, strict=True)))
    return best


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
@settings(deadline=None, max_examples=250)
@given(tables())
def test_all_three_find_the_optimum(found: list[list[float]]) -> None:
    gpus = len(found[0]) - 1
    least = [next((f for f, s in enumerate(table) if s < INF), gpus + 1) for table in found]
    for use_all in (False, True):
        best = brute_force(found, gpus, use_all=use_all)
        milp = solve_milp(found, gpus, use_all=use_all)
        assert (milp is None) == (best == INF)
        if milp is not None:
            assert milp[1] == pytest.approx(best)
            assert sum(milp[0]) == gpus if use_all else sum(milp[0]) <= gpus
        if milp is not None and use_all:  # what is left over goes where it helps most
            splits = [c for c in itertools.product(range(gpus + 1), repeat=len(found)) if sum(c) == gpus]
            latencies = [[table[f] for table, f in zip(found, c, strict=True)] for c in splits]
            least_sum = min(sum(row) for row in latencies if max(row) == best)
            assert sum(table[f] for table, f in zip(found, milp[0], strict=True)) == pytest.approx(least_sum)
    # latencies that do not rise make the two budgets alike, and the search meets both
    lazy = allocate([table.__getitem__ for table in found], least, gpus, range(gpus + 1))
    best = brute_force(found, gpus, use_all=False)
    assert (lazy is None) == (best == INF)
    if lazy is not None:
        assert lazy[1] == best
        assert sum(lazy[0]) <= gpus
        assert lazy[1] == max(table[f] for table, f in zip(found, lazy[0], strict=True))


def test_the_search_asks_for_few_latencies() -> None:
    """It raises the slowest tier only: on its way it never asks a tier for what it could not get."""
    asked: set[tuple[int, int]] = set()

    def latency(tier: int) -> "object":
        def at(f: int) -> float:
            asked.add((tier, f))
            return 100.0 / max(1, f) * (tier + 1)

        return at

    found = allocate([latency(t) for t in range(3)], [1, 1, 1], 64, range(65))  # type: ignore[misc]
    assert found is not None
    assert sum(found[0]) <= 64
    assert len(asked) <= 64 + 3
    assert np.isclose(found[1], max(100.0 / f * (t + 1) for t, f in enumerate(found[0])))
