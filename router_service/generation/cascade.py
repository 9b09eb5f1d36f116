"""Which tiers a request may use, and whether an answer is accepted. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from router_service.domain.events import EscalationReason
from services.domain.bursts import BurstStep
from services.domain.errors import NotFound
from services.domain.long_answers import long_threshold, stands_by_length
from services.domain.plans import CASCADE_MODEL, JudgeUnavailable, Plan, TierPlan
from services.domain.score_prediction import passes_over


@dataclass(frozen=True, slots=True)
class Accept:
    """The answer is accepted. reason: for logs and spans."""

    reason: str


@dataclass(frozen=True, slots=True)
class Escalate:
    """The tier at index `to` of the route is next."""

    to: int
    reason: EscalationReason


def route(plan: Plan, model: str) -> tuple[TierPlan, ...]:
    """The tiers that may answer, in order.

    Raises:
        NotFound: The plan has no such model.
    """
    if model == CASCADE_MODEL:
        return plan.tiers
    tier = plan.tier(model)
    if tier is None:
        raise NotFound("model", model)
    return (tier,)


def at_step(tiers: tuple[TierPlan, ...], step: BurstStep) -> tuple[TierPlan, ...]:
    """All tiers of a plan with the thresholds of a step of its burst ladder."""
    rules = zip(tiers[:-1], step.thresholds, strict=True)
    return (*(replace(tier, threshold=rule.score) for tier, rule in rules), tiers[-1])


def judged_at(tiers: Sequence[TierPlan], at: int) -> bool:
    """Whether the answer of tier `at` may be rejected: on every tier of a route except the last."""
    return at < len(tiers) - 1


def decide(
    plan: Plan,
    tiers: tuple[TierPlan, ...],
    at: int,
    score: float | None,
    *,
    accepts_tie: bool = True,
    counted_tokens: int = 0,
) -> Accept | Escalate:
    """Whether the answer of tier `at` is accepted: with a score of at least the threshold (CASCADIA section 3.1), or because
    it is long.

    score: None if it could not be judged. accepts_tie: whether a score of exactly the threshold is enough, as the request's
    step of the burst ladder has it. counted_tokens: output tokens of an answer whose length counts (see `counted_tokens`).
    """
    threshold = tiers[at].threshold
    if not judged_at(tiers, at) or threshold is None:
        return Accept("last_tier")
    if score is None:
        if plan.judge_unavailable is JudgeUnavailable.ACCEPT:
            return Accept("judge_unavailable")
        return Escalate(len(tiers) - 1, EscalationReason.JUDGE_UNAVAILABLE)
    if stands_by_length(tiers[at].long_answers, counted_tokens, score):
        return Accept("long_answer")
    if score == threshold and not accepts_tie:
        return Escalate(at + 1, EscalationReason.TIE_NOT_ACCEPTED)
    if score >= threshold:
        return Accept("score_at_least_threshold")
    return Escalate(at + 1, EscalationReason.SCORE_BELOW_THRESHOLD)


def counted_tokens(output_tokens: int, reason: str) -> int:
    """Of an answer's output tokens, those by which it may be a long answer.

    None of an answer that a guard of the judge has refused: one that was cut off or repeats itself is long for that reason.
    reason: of the verdict.
    """
    return 0 if reason else output_tokens


def lowest_accepted(tier: TierPlan, counted_tokens: int) -> float:
    """The score from which on an answer of a judged tier is accepted: its threshold, or that for long answers."""
    threshold, long = tier.threshold or 0.0, long_threshold(tier.long_answers, counted_tokens)
    return threshold if long is None else min(threshold, long)


def passed_over(tiers: tuple[TierPlan, ...], at: int, predicted: Mapping[str, float]) -> float | None:
    """The predicted score for which tier `at` is passed over; None if it is asked.

    predicted: the score predicted for each tier's answer, 0 to 100; tiers without a prediction are asked.
    """
    score = predicted.get(tiers[at].name)
    return score if judged_at(tiers, at) and passes_over(score, tiers[at].skip_below) else None


def flagged(score: float | None, flag_below: float) -> bool:
    """Whether an answer that no further tier can better is flagged to its client; what could not be scored is not."""
    return score is not None and score < flag_below


def unable(tiers: tuple[TierPlan, ...], at: int, reason: EscalationReason) -> Escalate | None:
    """Tier `at` cannot answer: escalate to the next one, if there is one."""
    return Escalate(at + 1, reason) if at < len(tiers) - 1 else None
