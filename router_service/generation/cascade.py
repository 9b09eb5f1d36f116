"""Which tiers a request may use, and whether an answer is accepted. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.services.acceptance import pipeline
from penstock.services.acceptance.threshold import accepts_all
from penstock.services.domain.errors import NotFound
from penstock.services.domain.plans import CASCADE_MODEL
from penstock.types.events import EscalationReason
from penstock.types.plans import JudgeUnavailable, Plan, TierPlan


@dataclass(frozen=True, slots=True)
class Escalate:
    """The tier at index `to` of the route is next. predicted_score: for which a tier was passed over; else None."""

    to: int
    reason: EscalationReason
    predicted_score: float | None = None


def route(plan: Plan, model: str) -> tuple[TierPlan, ...]:
    """The tiers that may answer, in order.

    Raises:
        NotFound: The plan has no such model.
    """
    if model == CASCADE_MODEL:
        return plan.tiers
    tier = plan.tier(model)
    if tier is None:
        raise NotFound("model", model, (CASCADE_MODEL, *(tier.name for tier in plan.tiers)))
    return (tier,)


def may_escalate_at(tiers: Sequence[TierPlan], at: int) -> bool:
    """Whether another tier may be asked instead of tier `at` or after it: on every tier of a route except the last."""
    return at < len(tiers) - 1


def judged_at(tiers: Sequence[TierPlan], at: int) -> bool:
    """Whether the answer of tier `at` may be rejected: not that of the last tier, nor of one that accepts all."""
    threshold = tiers[at].threshold
    return may_escalate_at(tiers, at) and threshold is not None and not accepts_all(threshold)


def decide(
    plan: Plan, tiers: tuple[TierPlan, ...], at: int, score: float | None, counted_tokens: int = 0
) -> Escalate | None:
    """None if the answer of tier `at` is accepted; see `pipeline.decide`. score: None if it could not be judged."""
    if not judged_at(tiers, at):
        return None
    if score is None:
        accepts = plan.judge_unavailable is JudgeUnavailable.ACCEPT
        return None if accepts else Escalate(len(tiers) - 1, EscalationReason.JUDGE_UNAVAILABLE)
    decision = pipeline.decide(tiers[at], score, counted_tokens)
    return None if decision.accepted else Escalate(at + 1, EscalationReason(decision.value))


def passed_over(tiers: tuple[TierPlan, ...], at: int, predicted: Mapping[str, float]) -> Escalate | None:
    """To the next tier, if tier `at` is passed over by predicted scores; None if it is asked.

    predicted: the score predicted for each tier's answer, 0 to 100; tiers without a prediction are asked.
    """
    score = predicted.get(tiers[at].name)
    if not may_escalate_at(tiers, at) or pipeline.is_asked(tiers[at], predicted):
        return None
    return Escalate(at + 1, EscalationReason.PREDICTED_SCORE_LOW, score)


def flagged(score: float | None, flag_below: float) -> bool:
    """Whether an answer that no further tier can better is flagged to its client; what could not be scored is not."""
    return score is not None and score < flag_below
