"""A price of waiting in the router: which limits it moves, and decisions under load in a running mesh."""

import asyncio

import pytest

from penstock import Judged
from penstock.router_service.routing.waiting_price import WaitingPrice
from penstock.services.acceptance.wait_price import Price
from penstock.services.domain.dispatch import REQUEST_TOKENS
from penstock.types.plans import TierPlan
from tests.conftest import MeshRunner

TOKENS, LONG = 400, 1_000_000
SLOW = {"overhead_ms": 4.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": LONG}
FAST = SLOW | {"overhead_ms": 0.2, "reply_tokens": TOKENS}


def test_only_the_limits_of_the_tier_at_hand_move() -> None:
    route = (TierPlan("small", "a", 60.0, 1), TierPlan("medium", "b", 70.0, 1), TierPlan("large", "c", None, 1))
    delays = {"small": 1.0, "medium": 2.0, "large": 4.0}
    waiting = WaitingPrice(Price(5.0), lambda tier, tokens: delays[tier] * tokens / REQUEST_TOKENS)
    assert waiting.to_ask(route, 0, {"medium": 50.0}) == route, "nothing is predicted for this tier"
    asking = waiting.to_ask(route, 1, {"medium": 25.0})
    assert (asking[0], asking[1].skip_below, asking[1].threshold, asking[2]) == (route[0], 5.0, 70.0, route[2])
    accepting = waiting.to_accept(route, 1, REQUEST_TOKENS // 2)
    assert (accepting[0], accepting[1].threshold, accepting[2]) == (route[0], 60.0, route[2])


@pytest.mark.parametrize("price", [0, 1000])
async def test_under_load_answers_are_accepted_with_lower_scores(run_mesh: MeshRunner, price: float) -> None:
    """While the next tier is busy, and with the price that the setting says; `judged` has the threshold that held."""
    tiers = [
        {"name": "small", "model": "sim-small", "threshold": 100, "simulated": FAST},
        {"name": "large", "model": "sim-large", "simulated": SLOW},
    ]
    router = {"waiting_price": price}
    async with run_mesh(tiers, router=router) as mesh, mesh.client() as client:
        assert (await client.generate("a prompt", temperature=0.0, max_tokens=20)).tier == "large"
        busy = asyncio.create_task(client.generate("another", model="large", temperature=0.0, max_tokens=LONG // 2))
        await mesh.until(lambda status: any(i.running for i in status.instances if i.tier == "large"))
        judged = [
            event
            async for event in client.stream("a prompt", temperature=0.0, max_tokens=TOKENS + 50)
            if isinstance(event, Judged)
        ]
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    (of_small,) = judged
    assert (of_small.threshold < 100) == (price > 0)
    assert of_small.score is not None
    assert of_small.accepted == (of_small.score >= of_small.threshold)
