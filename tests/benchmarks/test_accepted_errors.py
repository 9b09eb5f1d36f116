"""Rules that accept fewer wrong answers are the cheapest that do, and cost accuracy no more than the shipped one may."""

import numpy as np
import pytest

from benchmarks.accepted_errors import LIMITS, interval, stricter_rules
from models.training import operating_point
from models.training.measure import SLACK
from models.training.operating_point import Answers, Rule, outcome, outcomes


def answers(seed: int, count: int = 120) -> Answers:
    """Three tiers, each better than the one before, whose scores tell right from wrong, but for some."""
    rng = np.random.default_rng(seed)
    right = np.array([rng.random(count) < share for share in (0.4, 0.7, 0.9)])
    scores = np.clip(np.where(right[:2], 80.0, 20.0) + rng.normal(0, 25, (2, count)), 0, 100)
    costs = np.array([[1.0], [4.0], [20.0]]) * rng.uniform(0.5, 1.5, (3, count))
    return Answers(
        right, np.full((3, count), 10.0), costs, scores, np.clip(scores + rng.normal(0, 20, (2, count)), 0, 100)
    )


def test_each_limit_has_the_cheapest_rule_that_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_point, "THRESHOLDS", (10.0, 30.0, 50.0, 70.0, 90.0))
    skip_limits = (0.0, 30.0)
    fitting = {0.0: answers(1), 15.0: answers(2)}
    chosen = stricter_rules(fitting, skip_limits)
    assert [*chosen] == [limit for limit in LIMITS if limit in chosen]
    assert chosen, "some limit can be kept"
    target = float(fitting[0.0].right[-1].mean()) - SLACK
    costs = []
    for limit, (margin, rule) in chosen.items():
        result = outcome(fitting[margin], rule)
        assert result.wrong_among_accepted <= limit
        assert result.accuracy >= target
        able = [
            one_outcome.cost_ms
            for one in fitting.values()
            for _, one_outcome in outcomes(one, skip_limits)
            if one_outcome.wrong_among_accepted <= limit and one_outcome.accuracy >= target
        ]
        assert result.cost_ms == min(able)
        costs.append(result.cost_ms)
    assert costs == sorted(costs), "fewer wrong answers cost more"


def test_the_interval_holds_the_share() -> None:
    one, rule = answers(3), Rule((50.0, 50.0), (0.0, 0.0))
    low, high = interval(one, rule)
    assert low < outcome(one, rule).wrong_among_accepted < high
