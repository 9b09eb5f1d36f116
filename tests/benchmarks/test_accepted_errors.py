"""Rules that accept fewer wrong answers are the cheapest that do, and cost accuracy no more than the shipped one may."""

import pytest

from benchmarks.accepted_errors import LIMITS, interval, stricter_rules
from models.training import operating_point
from models.training.measure import SLACK
from models.training.operating_point import Rule, outcome, outcomes
from tests.models.test_operating_point import drawn


def test_each_limit_has_the_cheapest_rule_that_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_point, "THRESHOLDS", (10.0, 30.0, 50.0, 70.0, 90.0))
    skip_limits = (0.0, 30.0)
    fitting = {0.0: drawn(1), 15.0: drawn(2)}
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
    one, rule = drawn(3), Rule((50.0, 50.0), (0.0, 0.0))
    low, high = interval(one, rule)
    assert low < outcome(one, rule).wrong_among_accepted < high
