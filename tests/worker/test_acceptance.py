"""Which draft tokens stand: exact in both rules."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker_service.engine.randomness import uniform
from worker_service.speculation import acceptance


def test_matching_stops_at_the_first_difference() -> None:
    assert acceptance.matching([1, 2, 3], [1, 2, 3, 4]) == (3, 4)
    assert acceptance.matching([1, 9, 3], [1, 2, 3, 4]) == (1, 2)
    assert acceptance.matching([9], [1, 2]) == (0, 1)


def test_rejection_keeps_the_targets_distribution() -> None:
    """Over many draws, the first token comes out as often as the target says, whatever the draft's distribution."""
    target = np.array([[0.5, 0.3, 0.2, 0.0], [0.25, 0.25, 0.25, 0.25]], np.float32)
    q = ([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4])
    rng = np.random.default_rng(5)
    counts = np.zeros(4)
    rounds = 40_000
    for _ in range(rounds):
        draft = [int(rng.choice(4, p=q[1]))]
        accepted, token = acceptance.rejection(draft, target, [q], rng.random(2), rng.random(2))
        counts[draft[0] if accepted else token] += 1
    assert np.abs(counts / rounds - target[0]).max() < 0.01


def test_a_draft_from_the_targets_own_distribution_always_stands() -> None:
    target = np.array([[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]], np.float32)
    q = ([0, 1], [0.5, 0.5])
    assert acceptance.rejection([0, 1], target, [q, q], np.array([0.99, 0.99, 0.5]), np.array([0.1] * 3)) == (2, 0)


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8).filter(lambda w: sum(w) > 1e-3), st.floats(0, 0.999))
def test_a_draw_never_hits_weight_zero(weights: list[float], chance: float) -> None:
    assert weights[acceptance.drawn(np.array(weights), chance)] > 0


def test_uniform_numbers_are_uniform_and_differ_by_seed_offset_and_purpose() -> None:
    values = np.array([uniform(seed, offset) for seed in range(100) for offset in range(100)])
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(values.var() - 1 / 12) < 0.005
    assert len(set(values)) == len(values)
    assert uniform(1, 2, 0) != uniform(1, 2, 1)
