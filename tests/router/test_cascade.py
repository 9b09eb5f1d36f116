"""Whether an answer is accepted or the request escalates: pure."""

from dataclasses import replace

import pytest

from penstock.router_service.domain.events import RouterRequest
from penstock.router_service.generation import cascade
from penstock.router_service.generation.cascade import Escalate
from penstock.services.acceptance.long_answers import counted_tokens
from penstock.services.acceptance.pipeline import lowest_accepted
from penstock.services.domain.errors import InvalidRequest, NotFound
from penstock.types.events import EscalationReason
from penstock.types.plans import JudgeUnavailable, Plan, TierPlan
from penstock.types.prompts import TextPrompt
from penstock.types.requests import Resume
from penstock.types.rules import LongAnswers
from penstock.types.sampling import SamplingParams

PLAN = Plan(1, (TierPlan("small", "a", 60.0, 1), TierPlan("medium", "b", 70.0, 1), TierPlan("large", "c", None, 1)))


def test_the_cascade_is_all_tiers_and_a_tier_is_itself() -> None:
    assert [t.name for t in cascade.route(PLAN, "cascade")] == ["small", "medium", "large"]
    assert [t.name for t in cascade.route(PLAN, "medium")] == ["medium"]
    with pytest.raises(NotFound):
        cascade.route(PLAN, "huge")


@pytest.mark.parametrize("tier", ["huge", "large"])
def test_a_reply_is_resumed_at_a_tier_of_its_route(tier: str) -> None:
    prompt, sampling = TextPrompt("hello"), SamplingParams()
    request = RouterRequest("r", "medium", prompt, sampling, deadline_s=1.0, resume=Resume("medium", (1,)))
    medium = cascade.route(PLAN, "medium")
    assert cascade.entry(PLAN, medium, request) == 0
    with pytest.raises(NotFound if tier == "huge" else InvalidRequest, match=tier):
        cascade.entry(PLAN, medium, replace(request, resume=Resume(tier, (1,))))


@pytest.mark.parametrize(
    ("at", "score", "expected"),
    [
        (0, 60.0, None),
        (0, 59.99, Escalate(1, EscalationReason.SCORE_BELOW_THRESHOLD)),
        (1, 0.0, Escalate(2, EscalationReason.SCORE_BELOW_THRESHOLD)),
        (0, None, Escalate(2, EscalationReason.JUDGE_UNAVAILABLE)),
        (2, None, None),
        (2, 0.0, None),
    ],
)
def test_an_answer_stands_from_its_threshold_on(at: int, score: float | None, expected: Escalate | None) -> None:
    assert cascade.decide(PLAN, PLAN.tiers, at, score) == expected


@pytest.mark.parametrize("score", [None, 0.0])
def test_a_tier_that_accepts_all_needs_no_score(score: float | None) -> None:
    tiers = (replace(PLAN.tiers[0], threshold=0.0), *PLAN.tiers[1:])
    assert not cascade.judged_at(tiers, 0)
    assert cascade.decide(PLAN, tiers, 0, score) is None


LONG = (replace(PLAN.tiers[0], long_answers=LongAnswers(100, 20.0)), *PLAN.tiers[1:])


@pytest.mark.parametrize(
    ("tokens", "score", "expected"),
    [
        (100, 20.0, None),
        (100, 19.9, Escalate(1, EscalationReason.SCORE_BELOW_THRESHOLD)),
        (99, 59.0, Escalate(1, EscalationReason.SCORE_BELOW_THRESHOLD)),
        (99, 60.0, None),
        (100, None, Escalate(2, EscalationReason.JUDGE_UNAVAILABLE)),
    ],
)
def test_a_long_answer_is_accepted_from_its_own_score_on(
    tokens: int, score: float | None, expected: Escalate | None
) -> None:
    assert cascade.decide(PLAN, LONG, 0, score, counted_tokens=tokens) == expected


def test_what_a_guard_has_refused_is_not_long() -> None:
    """An answer that was cut off or repeats itself is long for that reason."""
    assert counted_tokens(500, "") == 500
    assert counted_tokens(500, "truncated") == 0


def test_the_threshold_that_clients_see_is_the_one_that_held() -> None:
    assert lowest_accepted(LONG[0], 99) == 60.0
    assert lowest_accepted(LONG[0], 100) == 20.0
    higher = replace(LONG[0], long_answers=LongAnswers(100, 90.0))
    assert lowest_accepted(higher, 100) == 60.0


def test_a_tier_alone_is_never_judged() -> None:
    alone = cascade.route(PLAN, "small")
    assert not cascade.judged_at(alone, 0)
    assert cascade.decide(PLAN, alone, 0, 1.0) is None


def test_without_a_judge_the_plan_may_let_answers_stand() -> None:
    plan = Plan(1, PLAN.tiers, judge_unavailable=JudgeUnavailable.ACCEPT)
    assert cascade.decide(plan, plan.tiers, 0, None) is None


@pytest.mark.parametrize(
    ("at", "predicted", "expected"),
    [
        (0, {"small": 29.0}, 29.0),
        (0, {"small": 30.0}, None),
        (0, {"medium": 29.0}, None),  # no prediction for this tier
        (0, {}, None),
        (1, {"medium": 0.0}, None),  # no limit at this tier
        (2, {"large": 29.0}, None),  # the last one
    ],
)
def test_a_tier_is_passed_over_for_a_predicted_score_below_its_limit_unless_it_is_the_last(
    at: int, predicted: dict[str, float], expected: float | None
) -> None:
    small, medium, large = PLAN.tiers
    tiers = (replace(small, skip_below=30.0), medium, replace(large, skip_below=30.0))
    low = EscalationReason.PREDICTED_SCORE_LOW
    assert cascade.passed_over(tiers, at, predicted) == (None if expected is None else Escalate(at + 1, low, expected))
