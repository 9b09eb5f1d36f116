"""One request on its way through the tiers of its route."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.router_service.domain.events import RequestOutput, RouterRequest
from penstock.router_service.domain.failures import FailureHistory
from penstock.router_service.generation import cascade
from penstock.router_service.generation.cascade import Escalate
from penstock.router_service.generation.rejected_answers import RejectedAnswers
from penstock.router_service.generation.tier_answer import resumed_ids
from penstock.router_service.routing.waiting_price import WaitingPrice
from penstock.services.domain.errors import NotFound, invalid
from penstock.types.events import Escalated, EscalationReason
from penstock.types.plans import Plan, TierPlan
from penstock.types.sampling import SamplingParams


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
        return cascade.judged_at(self.route, self.at)

    @property
    def may_escalate(self) -> bool:
        """Whether another tier may be asked instead of this one or after it."""
        return cascade.may_escalate_at(self.route, self.at) and not self.is_resumed

    def passed_over(self) -> Escalate | None:
        """To the next tier, if this one is passed over by predicted scores."""
        if not self.may_escalate:
            return None
        if self.waiting is not None:
            self.route = self.waiting.to_ask(self.route, self.at, self.predicted)
        return cascade.passed_over(self.route, self.at, self.predicted)

    def unable(self, reason: EscalationReason) -> Escalate | None:
        """The tier cannot answer: to the next one, if that may be asked."""
        return Escalate(self.at + 1, reason) if self.may_escalate else None

    def decide(self, score: float | None, counted_tokens: int) -> Escalate | None:
        """None if the tier's answer is accepted; see `cascade.decide`. What the judge refuses has no tokens, and no price."""
        if self.waiting is not None and self.may_escalate and counted_tokens:
            self.route = self.waiting.to_accept(self.route, self.at, counted_tokens)
        return cascade.decide(self.plan, self.route, self.at, score, counted_tokens)

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
