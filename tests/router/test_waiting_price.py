"""A price of waiting in the router: what delays are known, and decisions under load in a running mesh."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import AsyncClient, Judged
from penstock.router_service.routing.instance_pool import InstancePool
from penstock.router_service.routing.waiting_price import WaitingPrice
from penstock.services.domain.dispatch import REQUEST_TOKENS, work_tokens
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.types.plans import TierPlan
from tests.support.mesh import running_mesh
from tests.support.services import RedisProcess

CARD = ModelCard("small", "m", "d", "sim", 10_000, 1000, 16, 8)
PER_S = 1000.0
TOKENS, LONG = 400, 1_000_000
SLOW = {"overhead_ms": 4.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": LONG}
FAST = SLOW | {"overhead_ms": 0.2, "reply_tokens": TOKENS}


def worker(name: str, requests: int, pending_tokens: int, per_s: float = PER_S) -> InstanceRecord:
    load = Load((50,) * requests, (), 900, 1.0, pending_tokens=pending_tokens, prompt_tokens_per_s=per_s)
    return InstanceRecord(name, Role.WORKER, f"{name}:1", 1.0, 1, 9.0, model=CARD, load=load)


def pool_of(*records: InstanceRecord) -> InstancePool:
    view = MeshView()
    view.connect(records, None, asyncio.get_running_loop().time())
    return InstancePool(view, ejection_s=60.0)


async def test_the_delay_of_a_tier_is_that_of_its_least_busy_instance() -> None:
    """With what was sent there since its record; without instances that failed."""
    pool = pool_of(worker("a", 4, 500), worker("b", 2, 100))
    assert pool.delay_s("small", REQUEST_TOKENS) == work_tokens(100, 2, 100) / PER_S
    assert pool.delay_s("small", 0) == 0.1
    with pool.sending("b", 5000):
        assert pool.delay_s("small", REQUEST_TOKENS) == work_tokens(500, 4, 200) / PER_S
    pool.eject("b")
    assert pool.delay_s("small", 0) == 0.5
    assert pool.delay_s("medium", REQUEST_TOKENS) == 0.0, "it has no instances"


async def test_an_idle_instance_and_one_of_unknown_throughput_delay_nothing() -> None:
    assert pool_of(worker("a", 4, 500), worker("b", 0, 0)).delay_s("small", LONG) == 0.0
    assert pool_of(worker("a", 4, 500, per_s=0.0)).delay_s("small", LONG) == 0.0


def test_only_the_limits_of_the_tier_at_hand_move() -> None:
    route = (TierPlan("small", "a", 60.0, 1), TierPlan("medium", "b", 70.0, 1), TierPlan("large", "c", None, 1))
    delays = {"small": 1.0, "medium": 2.0, "large": 4.0}
    waiting = WaitingPrice(5.0, lambda tier, tokens: delays[tier] * tokens / REQUEST_TOKENS)
    assert waiting.to_ask(route, 0, {"medium": 50.0}) == route, "nothing is predicted for this tier"
    asking = waiting.to_ask(route, 1, {"medium": 25.0})
    assert (asking[0], asking[1].skip_below, asking[1].threshold, asking[2]) == (route[0], 5.0, 70.0, route[2])
    accepting = waiting.to_accept(route, 1, REQUEST_TOKENS // 2)
    assert (accepting[0], accepting[1].threshold, accepting[2]) == (route[0], 60.0, route[2])


@pytest.mark.parametrize("price", [0, 1000])
async def test_under_load_answers_are_accepted_with_lower_scores(
    redis: RedisProcess, tmp_path: Path, price: float
) -> None:
    """While the next tier is busy, and with the price that the setting says; `judged` has the threshold that held."""
    content: dict[str, Any] = {
        "name": f"waiting-{price}",
        "tiers": [
            {"name": "small", "engine": "simulated", "model": "sim-small", "threshold": 100, "simulated": FAST},
            {"name": "large", "engine": "simulated", "model": "sim-large", "simulated": SLOW},
        ],
        "judge": {"scorers": [{"name": "confidence", "kind": "confidence"}]},
        "router": {"grpc_port": 0, "http_port": 0, "waiting_price": price},
    }
    path = tmp_path / "mesh.yaml"
    path.write_text(yaml.safe_dump(content))
    async with running_mesh(path, redis.url) as mesh, mesh.client() as client:
        assert (await client.generate("a prompt", temperature=0.0, max_tokens=20)).tier == "large"
        busy = asyncio.create_task(client.generate("another", model="large", temperature=0.0, max_tokens=LONG // 2))
        while await running(client, "large") == 0:
            await asyncio.sleep(0.02)
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


async def running(client: AsyncClient, tier: str) -> int:
    """Requests at the workers of a tier, as the router knows them."""
    return sum(instance.running for instance in (await client.status()).instances if instance.tier == tier)
