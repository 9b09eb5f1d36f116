"""Overload: a quarter over the stage's average, and never more handed over than is too much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.domain.stages.overload import excess_tokens, to_hand_over

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("own", "peers", "excess"),
    [
        (125, [75], 0.0),  # exactly a quarter over an average of 100: not yet
        (126, [74], 26.0),
        (500, [], 0.0),  # alone in its stage
        (0, [0, 0], 0.0),
        (300, [0, 0], 200.0),
    ],
)
def test_overloaded_is_a_quarter_over_the_average(own: int, peers: list[int], excess: float) -> None:
    assert excess_tokens(own, peers) == pytest.approx(excess)


@given(LOADS)
def test_not_all_of_a_stage_are_overloaded(loads: list[int]) -> None:
    over = [excess_tokens(own, loads[:i] + loads[i + 1 :]) for i, own in enumerate(loads)]
    assert min(over) == 0.0


@given(LOADS, st.lists(st.integers(1, 500), min_size=1, max_size=8))
def test_what_is_handed_over_leaves_the_sender_at_the_average_or_over(peers: list[int], lengths: list[int]) -> None:
    excess = excess_tokens(sum(lengths), peers)
    running = {f"r{i}": tokens for i, tokens in enumerate(lengths)}
    chosen = to_hand_over(running, excess)
    fitting = [tokens for tokens in lengths if tokens <= excess]
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        assert running[chosen] == max(fitting)
        average = (sum(lengths) + sum(peers)) / (1 + len(peers))
        assert sum(lengths) - running[chosen] >= average - 1e-6
