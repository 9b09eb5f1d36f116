"""Waiting has a price: the limits of a tier move with the load. No I/O.

The delay of a tier is by how many seconds the work that is pending there delays an answer
(`services.domain.dispatch.delay_s`). The seconds that a decision costs, times the price, count against it. Idle tiers delay
nothing: then the limits are those of the plan.
"""

from dataclasses import dataclass, replace

from penstock.types.plans import TierPlan


@dataclass(frozen=True, slots=True)
class Price:
    """per_s: points of score that a second costs. most: points by which limits move at most, however long it takes."""

    per_s: float
    most: float = 100.0

    def of(self, seconds: float) -> float:
        """Points; those of less than no time are negative."""
        return max(-self.most, min(self.per_s * seconds, self.most))


def priced_to_ask(tier: TierPlan, predicted: float, price: Price, own_s: float, next_s: float) -> TierPlan:
    """The tier with the `skip_below` that holds under load.

    A request that asks the tier waits there, and in the next tier, too, if its answer is not accepted; one that passes it
    over waits in the next tier. predicted: the score, which is the chance of acceptance. own_s, next_s: the delays of both.
    A tier that is passed over for a better one is so for a smaller gain.
    """
    moved, better = price.of(own_s - predicted / 100 * next_s), tier.skip_for
    if moved and better is not None:
        tier = replace(tier, skip_for=replace(better, gain=better.gain - moved))
    if not moved or (better is not None and tier.skip_below is None):
        return tier
    return replace(tier, skip_below=(tier.skip_below or 0.0) + moved)


def priced_to_accept(tier: TierPlan, price: Price, next_s: float) -> TierPlan:
    """The tier with the threshold that holds under load. next_s: the delay of the next tier, to which requests escalate."""
    assert tier.threshold is not None
    return replace(tier, threshold=max(0.0, tier.threshold - price.of(next_s))) if next_s else tier
