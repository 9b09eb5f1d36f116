"""Which tiers a request may use, whether an answer is accepted, and the way of a request through its tiers. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.router_service.domain.events import RequestOutput, RouterRequest
from penstock.router_service.domain.failures import FailureHistory
from penstock.router_service.generation.rejected_answers import RejectedAnswers
from penstock.router_service.generation.tier_answer import resumed_ids
from penstock.router_service.routing.waiting_price import WaitingPrice
from penstock.services.acceptance import pipeline
from penstock.services.acceptance.threshold import accepts_all
from penstock.services.domain.errors import NotFound, invalid
from penstock.services.domain.plans import CASCADE_MODEL
from penstock.types.events import Escalated, EscalationReason
from penstock.types.plans import JudgeUnavailable, Plan, TierPlan
from penstock.types.sampling import SamplingParams


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


@dataclass(slots=True)
class CascadeRequest:
    """at: index of the tier of `route` that is asked. sampling: the request's, with a seed. predicted: the score of
    each tier's answer; empty if no tier could be passed over for it. rejected: keeps the answers that are not accepted.
    waiting: moves the limits of `route` with the load; None: load does not matter. history: failures in all tiers.
    """

    request: RouterRequest
    plan: Plan
    output: RequestOutput
    route: tuple[TierPlan, ...]
    at: int
    sampling: SamplingParams
    predicted: Mapping[str, float]
    rejected: RejectedAnswers
    waiting: WaitingPrice | None = None
    history: FailureHistory = field(default_factory=FailureHistory)

    @property
    def tier(self) -> TierPlan:
        """The tier that is asked."""
        return self.route[self.at]

    @property
    def is_resumed(self) -> bool:
        """Whether the tier continues an answer, which has been accepted before."""
        return resumed_ids(self.request, self.tier) is not None

    @property
    def is_judged(self) -> bool:
        """Whether the tier's answer may be rejected."""
        return judged_at(self.route, self.at)

    @property
    def may_escalate(self) -> bool:
        """Whether another tier may be asked instead of this one or after it."""
        return may_escalate_at(self.route, self.at) and not self.is_resumed

    def passed_over(self) -> Escalate | None:
        """To the next tier, if this one is passed over by predicted scores."""
        if not self.may_escalate:
            return None
        if self.waiting is not None:
            self.route = self.waiting.to_ask(self.route, self.at, self.predicted)
        return passed_over(self.route, self.at, self.predicted)

    def unable(self, reason: EscalationReason) -> Escalate | None:
        """The tier cannot answer: to the next one, if that may be asked."""
        return Escalate(self.at + 1, reason) if self.may_escalate else None

    def decide(self, score: float | None, counted_tokens: int) -> Escalate | None:
        """None if the tier's answer is accepted. What the judge refuses has no tokens, and no price."""
        if self.waiting is not None and self.may_escalate and counted_tokens:
            self.route = self.waiting.to_accept(self.route, self.at, counted_tokens)
        return decide(self.plan, self.route, self.at, score, counted_tokens)

    def escalate(self, escalation: Escalate) -> None:
        """Ask another tier from now on."""
        to = self.route[escalation.to]
        self.output.event(Escalated(self.tier.name, to.name, escalation.reason, escalation.predicted_score))
        self.at = escalation.to


def entry(plan: Plan, route: tuple[TierPlan, ...], request: RouterRequest) -> int:
    """Index of the tier at which the route begins: the first one, or the one whose reply is resumed.

    Raises:
        NotFound: The plan has no such tier.
        InvalidRequest: The tier is not on this route.
    """
    if request.resume is None:
        return 0
    for i, tier in enumerate(route):
        if tier.name == request.resume.tier:
            return i
    if plan.tier(request.resume.tier) is None:
        raise NotFound("tier", request.resume.tier)
    raise invalid("resume.tier", f"'{request.resume.tier}' is not on the way of model '{request.model[:80]}'")
