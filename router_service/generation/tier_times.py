"""How long tiers and the judge take, for the deadlines of tiers whose answers are held. No I/O.

The first token of an answer is due at a fixed time. An answer that is judged must be complete by its *finish-by* time: the
due time less the time for judging it and a reserve, in which the last tier could still produce its first token if the answer
is not accepted. The last tier's own answer, which is held only to be compared with an earlier one, needs no reserve. Times
are the 95th percentiles of recent ones, over all requests; what has not been measured counts as 0.
"""

from collections.abc import Sequence

from penstock.services.domain.slo.sliding_sample import SlidingSample
from penstock.types.plans import TierPlan

QUANTILE = 0.95
SAMPLES = 128
MAX_AGE_S = 60.0
"""Older times do not count: a tier that is skipped is not measured, and must be tried again."""


class _Times:
    """Recent times of one tier: to the first token, from there to the end, and the whole."""

    __slots__ = ("first", "rest", "whole")

    def __init__(self) -> None:
        self.first, self.rest, self.whole = (SlidingSample(SAMPLES, MAX_AGE_S) for _ in range(3))


class TierTimes:
    """Measured times of all tiers of a router. Times are the event loop's."""

    def __init__(self) -> None:
        self._tiers: dict[str, _Times] = {}
        self._judge = SlidingSample(SAMPLES, MAX_AGE_S)

    def answered(self, tier: str, began_s: float, first_token_s: float, now_s: float) -> None:
        """A tier has completed an answer now."""
        times = self._tiers.get(tier)
        if times is None:
            times = self._tiers[tier] = _Times()
        times.first.add(first_token_s - began_s, now_s)
        times.rest.add(now_s - first_token_s, now_s)
        times.whole.add(now_s - began_s, now_s)

    def judged(self, began_s: float, now_s: float) -> None:
        """An answer has been judged now."""
        self._judge.add(now_s - began_s, now_s)

    def finish_by_s(self, due_s: float, tiers: Sequence[TierPlan], now_s: float) -> float:
        """When a held answer must be complete. due_s: when the first token is due. tiers: from that of the answer on."""
        reserve_s = _p95(self._times(tiers[-1].name).first, now_s) if len(tiers) > 1 else 0.0
        return due_s - _p95(self._judge, now_s) - reserve_s

    def is_too_late(self, tier: str, finish_by_s: float, now_s: float) -> bool:
        """Whether an answer that a tier begins now is predicted to be complete too late."""
        return now_s + _p95(self._times(tier).whole, now_s) > finish_by_s

    def first_token_due_s(self, tier: str, finish_by_s: float, now_s: float) -> float:
        """When the first token of a held answer is due at its worker."""
        return finish_by_s - _p95(self._times(tier).rest, now_s)

    def _times(self, tier: str) -> _Times:
        return self._tiers.get(tier) or _Times()


def _p95(sample: SlidingSample, now_s: float) -> float:
    sample.expire(now_s)
    return sample.quantile(QUANTILE) or 0.0
