"""The compiled ranking of replica mixes against a plain enumeration."""

import itertools

import numpy as np
import pytest

from planner_service.deployment import ranking
from planner_service.simulator.workload import Floats


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
        found = ranking.promising_pairs(sizes, capacity, alone, rate, 20.0, gpus, most, keep)
        assert [tuple(row) for row in found.tolist()] == [parts for _, parts in every[:keep]]
        triples = {
            parts
            for i, j, k in itertools.combinations(range(4), 3)
            for n, m, p in itertools.product(range(1, most + 1), repeat=3)
            for parts in [((i, n), (j, m), (k, p))]
            for left in [gpus - n * sizes[i] - m * sizes[j] - p * sizes[k]]
            if 0 <= left < min(sizes[i], sizes[j], sizes[k]) and sorted((n, m, p))[1] <= ranking.MAX_OTHERS
        }
        rows = ranking.promising_triples(sizes, capacity, alone, rate, 20.0, gpus, most, 10_000).tolist()
        named = [tuple(sorted(((i, n), (j, m), (k, p)))) for i, n, j, m, k, p in rows]
        assert set(named) == triples
        guesses = [estimate(list(parts)) for parts in named]
        assert guesses == pytest.approx(sorted(guesses))


def test_kinds_that_are_passed_over_are_not_among_the_most_promising() -> None:
    """A few rows are the first of all rows, ties included: with room for all rows, no kind is passed over."""
    rng = np.random.default_rng(7)
    for _ in range(60):
        kinds = int(rng.integers(3, 11))
        sizes = rng.choice([1, 2, 3, 4, 6, 8, 16, 32], kinds)
        capacity, alone = rng.integers(1, 5, kinds) * 0.3 * sizes, rng.integers(1, 12, kinds) * 0.5
        gpus, most = int(rng.integers(3, 300)), int(rng.integers(1, 400))
        rate = float(capacity.max() / sizes[capacity.argmax()] * gpus * rng.uniform(0.1, 1.3))
        cluster = (sizes, capacity, alone, rate, 20.0, gpus, most)
        for promising in (ranking.promising_pairs, ranking.promising_triples):
            np.testing.assert_array_equal(promising(*cluster, 6), promising(*cluster, 30_000)[:6])
