"""The rule that the family is shipped with: what it does to answers, and that none is cheaper."""

import itertools

import numpy as np
import pytest

from models.training import operating_point
from models.training.operating_point import Answers, Rule, choose, outcome


def answers() -> Answers:
    """Four prompts and three tiers. Tokens and costs are 1, 10 and 100."""
    right = np.array([[True, False, False, False], [True, True, False, False], [True, True, True, True]])
    sizes = np.array([[1.0] * 4, [10.0] * 4, [100.0] * 4])
    scores = np.array([[90.0, 10.0, 80.0, 5.0], [90.0, 90.0, 90.0, 5.0]])
    predicted = np.array([[90.0, 60.0, 30.0, 1.0], [90.0, 80.0, 70.0, 1.0]])
    return Answers(right, sizes, sizes, scores, predicted)


def drawn(seed: int, count: int = 60) -> Answers:
    rng = np.random.default_rng(seed)
    right = rng.random((3, count)) < np.array([[0.4], [0.7], [0.95]])
    tokens = rng.integers(1, 50, (3, count)).astype(float)
    noise = rng.normal(0, 20, (2, count))
    scores = np.clip(70.0 * right[:-1] + 15 + noise, 0, 100)
    predicted = np.clip(50.0 * right[:-1] + 25 + 2 * noise, 0, 100)
    return Answers(right, tokens, tokens * np.array([[1.0], [5.0], [20.0]]), scores, predicted)


def test_the_first_answer_that_is_accepted_stands() -> None:
    found = outcome(answers(), Rule((50.0, 50.0), (0.0, 0.0)))
    assert found.accuracy == 0.75
    assert found.shares == (0.5, 0.25, 0.25)
    assert found.wrong_among_accepted == pytest.approx(1 / 3)
    assert found.cost_ms == pytest.approx((4 * 1 + 2 * 10 + 100) / 4)
    assert found.tokens_in_vain == pytest.approx((2 * 1 + 10) / 4)


def test_tiers_are_passed_over_by_what_is_predicted() -> None:
    found = outcome(answers(), Rule((50.0, 50.0), (50.0, 75.0)))
    assert found.accuracy == 1.0  # the third prompt, which small and medium get wrong, goes to large
    assert found.shares == (0.25, 0.25, 0.5)
    assert found.tokens_in_vain == pytest.approx(1 / 4)


def test_nothing_accepted_is_the_last_tier_alone() -> None:
    found = outcome(answers(), Rule((101.0, 101.0), (0.0, 0.0)))
    assert (found.accuracy, found.shares[-1], found.wrong_among_accepted) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_no_rule_that_is_accurate_enough_costs_less(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_point, "THRESHOLDS", (20.0, 50.0, 80.0))
    limits, slack, given = (0.0, 25.0, 50.0), 0.02, drawn(seed)
    chosen = outcome(given, choose(given, slack, limits))
    target = given.right[-1].mean() - slack
    assert chosen.accuracy >= target
    for thresholds in itertools.product((20.0, 50.0, 80.0), repeat=2):
        for skip_below in itertools.product(limits, repeat=2):
            other = outcome(given, Rule(thresholds, skip_below))
            assert other.accuracy < target or other.cost_ms >= chosen.cost_ms


def test_where_no_rule_is_accurate_enough_the_most_accurate_is_taken() -> None:
    given = drawn(7)
    found = outcome(given, choose(given, -1.0, (0.0,)))
    thresholds = itertools.product(operating_point.THRESHOLDS, repeat=2)
    assert found.accuracy == max(outcome(given, Rule(pair, (0.0, 0.0))).accuracy for pair in thresholds)
