"""Which draft tokens are accepted, and the random numbers by which replies are drawn."""

import numpy as np

from penstock.services.domain.randomness import uniform


def test_uniform_numbers_are_uniform_and_differ_by_seed_offset_and_purpose() -> None:
    values = np.array([uniform(seed, offset) for seed in range(100) for offset in range(100)])
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(values.var() - 1 / 12) < 0.005
    assert len(set(values)) == len(values)
    assert uniform(1, 2, 0) != uniform(1, 2, 1)
