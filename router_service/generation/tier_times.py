"""How long tiers and the judge take, for the deadlines of tiers whose answers are held. No I/O.

The first token of an answer is due at a fixed time. An answer that is judged must be complete by its *finish-by* time: the
due time less the time for judging it and a reserve, in which the last tier could still produce its first token if the answer
is not accepted. The last tier's own answer, which is held only to be compared with an earlier one, needs no reserve. Times
are the 95th percentiles of recent ones, over all requests; what has not been measured counts as 0.
"""

from collections import defaultdict
from collections.abc import Sequence

from penstock.services.domain.slo.sliding_sample import SlidingSample
from penstock.types.plans import TierPlan

QUANTILE = 0.95
SAMPLES = 128
MAX_AGE_S = 60.0
"""Older times do not count: a tier that is skipped is not measured, and must be tried again."""


FIRST, REST, WHOLE, JUDGING = "first", "rest", "whole", "judging"
"""Times of an answer: to its first token, from there to its end, both, and that of judging it."""


class TierTimes:
    """Measured times of all tiers of a router. Times are the event loop's."""

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

    def _p95(self, tier: str, time: str, now_s: float) -> float:
        sample = self._samples[tier, time]
        sample.expire(now_s)
        return sample.quantile(QUANTILE) or 0.0
