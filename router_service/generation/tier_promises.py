"""What the reply of each tier is asked to keep of a request's SLO. No I/O."""

from collections.abc import Sequence

from penstock.router_service.domain.events import RouterRequest
from penstock.router_service.domain.reply_promise import ReplyPromise
from penstock.router_service.generation import cascade
from penstock.router_service.generation.tier_answer import resumed_ids
from penstock.router_service.generation.tier_times import TierTimes
from penstock.services.domain.slo.promises import Promise
from penstock.types.plans import TierPlan
from penstock.types.slo import SloFallback


class TierPromises:
    """Divides the time that a request's SLO leaves, by the measured times of a router's tiers."""

    def __init__(self, times: TierTimes) -> None:
        self._times = times

    def of(
        self, request: RouterRequest, route: Sequence[TierPlan], at: int, now_s: float, *, held: bool
    ) -> ReplyPromise | None:
        """What a tier's reply is asked to keep; None without an SLO, and for a held tier that would be too late.

        A held answer has no pace, because its client does not see it grow: it must be complete in time. The last tier, which
        is held to be compared with an earlier answer, is neither too late nor declined: no tier comes after it.
        """
        if request.promise is None:
            return None
        tier = route[at]
        if not held:
            resumed = resumed_ids(request, tier)
            text = request.resume.text if request.resume is not None and resumed else ""
            return ReplyPromise(request.promise, len(resumed or ()), text)
        due_s = request.promise.first_token_due_s
        if due_s is None:
            return ReplyPromise(Promise(None))
        finish_by_s = self._times.finish_by_s(due_s, route[at:], now_s)
        may_escalate = cascade.may_escalate_at(route, at)
        if may_escalate and self._times.is_too_late(tier.name, finish_by_s, now_s):
            return None
        first_due_s = self._times.first_token_due_s(tier.name, finish_by_s, now_s)
        fallback = SloFallback.DECLINE if may_escalate else SloFallback.BEST_EFFORT
        return ReplyPromise(Promise(first_due_s, fallback=fallback))

    def allows_holding_last(self, request: RouterRequest, last: TierPlan, now_s: float) -> bool:
        """Whether the last tier's answer may be held until it has been judged, as far as the request's SLO goes.

        An answer that would then be too late is streamed instead. So is that of a request which is to be declined rather than
        served late: no request is declined because its answer would be held.
        """
        if request.promise is None or request.promise.first_token_due_s is None:
            return True
        if request.promise.fallback is SloFallback.DECLINE:
            return False
        finish_by_s = self._times.finish_by_s(request.promise.first_token_due_s, (last,), now_s)
        return not self._times.is_too_late(last.name, finish_by_s, now_s)
