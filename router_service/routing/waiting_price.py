"""The limits of a request's tiers under load, by what the router knows of the work that waits in them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.services.acceptance.wait_price import Price, priced_to_accept, priced_to_ask
from penstock.services.domain.dispatch import REQUEST_TOKENS
from penstock.types.plans import TierPlan

Route = tuple[TierPlan, ...]


@dataclass(frozen=True, slots=True)
class WaitingPrice:
    """delay_s: of a tier, for an answer of so many tokens."""

    price: Price
    delay_s: Callable[[str, float], float]

    def to_ask(self, route: Route, at: int, predicted: Mapping[str, float]) -> Route:
        """The route as it is before its tier `at` is asked; the same where there is no prediction."""
        tier, following = route[at], route[at + 1]
        if (score := predicted.get(tier.name)) is None:
            return route
        own_s, next_s = (self.delay_s(one.name, REQUEST_TOKENS) for one in (tier, following))
        return (*route[:at], priced_to_ask(tier, score, self.price, own_s, next_s), *route[at + 1 :])

    def to_accept(self, route: Route, at: int, tokens: int) -> Route:
        """The route as it is when its tier `at` has answered with so many tokens."""
        next_s = self.delay_s(route[at + 1].name, tokens)
        return (*route[:at], priced_to_accept(route[at], self.price, next_s), *route[at + 1 :])
