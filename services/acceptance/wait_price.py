"""Waiting has a price: the limits of a tier move with the load. No I/O.

The price is in points of score per second. The delay of a tier is by how many seconds the work that is pending there delays
an answer (`services.domain.dispatch.delay_s`). The seconds that a decision costs, times the price, count against it. Idle
tiers delay nothing: then, and with a price of 0, the limits are those of the plan.
"""

from dataclasses import replace

from penstock.types.plans import TierPlan


def priced_to_ask(tier: TierPlan, predicted: float, price: float, own_s: float, next_s: float) -> TierPlan:
    """The tier with the `skip_below` that holds under load.

    A request that asks the tier waits there, and in the next tier, too, if its answer is not accepted; one that passes it
    over waits in the next tier. predicted: the score, which is the chance of acceptance. own_s, next_s: the delays of both.
    A tier that is passed over for a better one is so for a smaller gain.
    """
    moved, better = price * (own_s - predicted / 100 * next_s), tier.skip_for
    if moved and better is not None:
        tier = replace(tier, skip_for=replace(better, gain=better.gain - moved))
    if not moved or (better is not None and tier.skip_below is None):
        return tier
    return replace(tier, skip_below=(tier.skip_below or 0.0) + moved)


def priced_to_accept(tier: TierPlan, price: float, next_s: float) -> TierPlan:
    """The tier with the threshold that holds under load. next_s: the delay of the next tier, to which requests escalate."""
    assert tier.threshold is not None
    return replace(tier, threshold=max(0.0, tier.threshold - price * next_s)) if price * next_s else tier
