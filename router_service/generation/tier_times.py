"""How long tiers and the judge take, and what the reply of each tier is asked to keep of a request's SLO. No I/O.

The first token of an answer is due at a fixed time. An answer that is judged must be complete by its *finish-by* time: the
due time less the time for judging it and a reserve, in which the last tier could still produce its first token if the answer
is not accepted. The last tier's own answer, which is held only to be compared with an earlier one, needs no reserve. Times
are the 95th percentiles of recent ones, over all requests; what has not been measured counts as 0.
"""

from collections import defaultdict
from collections.abc import Sequence

from penstock.router_service.domain.events import RouterRequest
from penstock.router_service.domain.reply_promise import ReplyPromise
from penstock.router_service.generation import cascade
from penstock.router_service.generation.tier_answer import resumed_ids
from penstock.services.domain.slo.promises import Promise
from penstock.services.domain.slo.sliding_sample import SlidingSample
from penstock.types.plans import TierPlan
from penstock.types.slo import SloFallback

QUANTILE = 0.95
SAMPLES = 128
MAX_AGE_S = 60.0
"""Older times do not count: a tier that is skipped is not measured, and must be tried again."""


FIRST, REST, WHOLE, JUDGING = "first", "rest", "whole", "judging"
"""Times of an answer: to its first token, from there to its end, both, and that of judging it."""


class TierTimes:
    """Measured times of all tiers of a router, by which it divides what an SLO leaves. Times are the event loop's."""

    def __init__(self) -> None:
        self._samples = defaultdict[tuple[str, str], SlidingSample](lambda: SlidingSample(SAMPLES, MAX_AGE_S))

    def answered(self, tier: str, began_s: float, first_token_s: float, now_s: float) -> None:
        """A tier has completed an answer now."""
        self._samples[tier, FIRST].add(first_token_s - began_s, now_s)
        self._samples[tier, REST].add(now_s - first_token_s, now_s)
        self._samples[tier, WHOLE].add(now_s - began_s, now_s)

    def judged(self, began_s: float, now_s: float) -> None:
        """An answer has been judged now."""
        self._samples["", JUDGING].add(now_s - began_s, now_s)

    def finish_by_s(self, due_s: float, tiers: Sequence[TierPlan], now_s: float) -> float:
        """When a held answer must be complete. due_s: when the first token is due. tiers: from that of the answer on."""
        reserve_s = self._p95(tiers[-1].name, FIRST, now_s) if len(tiers) > 1 else 0.0
        return due_s - self._p95("", JUDGING, now_s) - reserve_s

    def is_too_late(self, tier: str, finish_by_s: float, now_s: float) -> bool:
        """Whether an answer that a tier begins now is predicted to be complete too late."""
        return now_s + self._p95(tier, WHOLE, now_s) > finish_by_s

    def first_token_due_s(self, tier: str, finish_by_s: float, now_s: float) -> float:
        """When the first token of a held answer is due at its worker."""
        return finish_by_s - self._p95(tier, REST, now_s)

    def promise(
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
        finish_by_s = self.finish_by_s(due_s, route[at:], now_s)
        may_escalate = cascade.may_escalate_at(route, at)
        if may_escalate and self.is_too_late(tier.name, finish_by_s, now_s):
            return None
        first_due_s = self.first_token_due_s(tier.name, finish_by_s, now_s)
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
        finish_by_s = self.finish_by_s(request.promise.first_token_due_s, (last,), now_s)
        return not self.is_too_late(last.name, finish_by_s, now_s)

    def _p95(self, tier: str, time: str, now_s: float) -> float:
        sample = self._samples[tier, time]
        sample.expire(now_s)
        return sample.quantile(QUANTILE) or 0.0
