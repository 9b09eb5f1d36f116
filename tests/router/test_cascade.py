"""Accept or escalation: pure."""

import pytest

from router_service.domain.events import EscalationReason
from router_service.generation import cascade
from router_service.generation.cascade import Accept, Escalate
from services.domain import JudgeUnavailable, NotFound, Plan, TierPlan

PLAN = Plan(1, (TierPlan("small", "a", 60.0, 1), TierPlan("medium", "b", 70.0, 1), TierPlan("large", "c", None, 1)))


def test_the_cascade_is_all_tiers_and_a_tier_is_itself() -> None:
    assert [t.name for t in cascade.route(PLAN, "cascade")] == ["small", "medium", "large"]
    assert [t.name for t in cascade.route(PLAN, "medium")] == ["medium"]
    with pytest.raises(NotFound):
        cascade.route(PLAN, "huge")


@pytest.mark.parametrize(
    ("at", "score", "expected"),
    [
        (0, 60.0, Accept("score_at_least_threshold")),
        (0, 59.99, Escalate(1, EscalationReason.SCORE_BELOW_THRESHOLD)),
        (1, 0.0, Escalate(2, EscalationReason.SCORE_BELOW_THRESHOLD)),
        (0, None, Escalate(2, EscalationReason.JUDGE_UNAVAILABLE)),
        (2, None, Accept("last_tier")),
        (2, 0.0, Accept("last_tier")),
    ],
)
def test_an_answer_stands_from_its_threshold_on(at: int, score: float | None, expected: Accept | Escalate) -> None:
    assert cascade.decide(PLAN, PLAN.tiers, at, score) == expected


def test_a_tier_alone_is_never_judged() -> None:
    alone = cascade.route(PLAN, "small")
    assert not cascade.judged_at(alone, 0)
    assert cascade.decide(PLAN, alone, 0, 1.0) == Accept("last_tier")


def test_without_a_judge_the_plan_may_let_answers_stand() -> None:
    plan = Plan(1, PLAN.tiers, judge_unavailable=JudgeUnavailable.ACCEPT)
    assert cascade.decide(plan, plan.tiers, 0, None) == Accept("judge_unavailable")


def test_a_tier_that_cannot_answer_hands_on_unless_it_is_the_last() -> None:
    reason = EscalationReason.TIER_UNAVAILABLE
    assert cascade.unable(PLAN.tiers, 1, reason) == Escalate(2, reason)
    assert cascade.unable(PLAN.tiers, 2, reason) is None
