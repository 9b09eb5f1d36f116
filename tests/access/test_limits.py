"""The limits of tenants: in any 60 s no more than the limit, over all routers; each router alone without Redis."""

import asyncio
import itertools
import math
import random
import time
import uuid
from collections.abc import Callable

import pytest

from penstock.router_service.tenancy.quota import Quota
from penstock.services.access.tenants import (
    RESERVED_OUTPUT_TOKENS,
    WINDOW_S,
    UsageWindow,
    rate_limit_headers,
    reserved_tokens,
)
from penstock.services.domain.errors import InvalidRequest, PermissionDenied, RateLimited
from penstock.services.mesh_schema.access import MeshTenant
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.state.connection import connect
from penstock.services.state.keys import Keys
from penstock.services.state.limits import SharedLimits
from penstock.services.state.usage import UsageOf, UsageStore
from penstock.types.prompts import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from penstock.types.sampling import SamplingParams
from tests.support.services import RedisProcess

LIMITED = MeshTenant(name="a", models=("small",), max_tokens=100, max_n=2, max_priority=5, slo=False)


def check(tenant: MeshTenant = LIMITED, model: str = "small", tokens: int | None = 10, n: int = 1, priority: int = 0,
          slo_class: str | None = None) -> None:  # fmt: skip
    tenant.check(model, SamplingParams(max_tokens=tokens), n, priority, slo_class=slo_class)


def test_a_tenant_may_ask_for_what_its_limits_allow_and_no_more() -> None:
    check(tokens=100, n=2, priority=5)
    check(tokens=None, priority=-100)
    with pytest.raises(PermissionDenied, match="model"):
        check(model="large")
    for field, changes in (
        ("sampling.max_tokens", {"tokens": 101}),
        ("n", {"n": 3}),
        ("priority", {"priority": 6}),
        ("slo", {"slo_class": ""}),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check(**changes)
        assert [problem.field for problem in caught.value.problems] == [field]
    check(MeshTenant(name="b"), model="large", tokens=10**9, n=100, priority=100, slo_class="")


def test_a_tenant_may_name_its_classes_and_no_others() -> None:
    """With classes of its own, latencies that a request chooses itself are refused too; without an SLO nothing is."""
    tenant = MeshTenant(name="a", slo_classes=("batch", "slow"))
    for slo_class in ("batch", "slow", None):
        check(tenant, slo_class=slo_class)
    for slo_class in ("interactive", ""):
        with pytest.raises(InvalidRequest, match="batch, slow") as caught:
            check(tenant, slo_class=slo_class)
        assert [problem.field for problem in caught.value.problems] == ["slo.name"]


def test_a_tenant_s_classes_must_exist() -> None:
    mesh = {"tiers": [{"name": "small"}], "access": {"tenants": [{"name": "a", "slo_classes": ["batch"]}]}}
    with pytest.raises(ValueError, match=r"access\.tenants\.0\.slo_classes: no class 'batch'"):
        MeshFile.model_validate(mesh)
    assert MeshFile.model_validate({**mesh, "slo": {"classes": {"batch": {}}}}).access.tenants[0].slo_classes == (
        "batch",
    )


def test_tokens_are_reserved_by_the_prompt_and_the_limit_of_the_reply() -> None:
    chat = ChatPrompt((ChatMessage("user", "x" * 40), ChatMessage("user", "y")))
    assert reserved_tokens(chat, SamplingParams(max_tokens=7)) == 11 + 7
    assert reserved_tokens(TextPrompt("x" * 8), SamplingParams()) == 2 + RESERVED_OUTPUT_TOKENS
    assert reserved_tokens(TokenPrompt((1, 2, 3)), SamplingParams(max_tokens=1)) == 4


def test_no_window_of_a_minute_has_more_than_the_limit_and_full_use_has_nearly_that() -> None:
    """Arrivals at random times, more than can be admitted; a caller that waits as it is told is admitted."""
    rng, window, limit, now = random.Random(4), UsageWindow(), 50, 1_000.25
    times: list[tuple[float, int]] = []
    while now < 1_600:
        amount = rng.randint(1, 5)
        if (wait_s := window.free_in_s(now, amount, limit)) > 0:
            now += wait_s
            assert window.free_in_s(now, amount, limit) == 0
        window.add(now, amount)
        times.append((now, amount))
        now += rng.choice((0.0, 0.01, 0.3))
    for start, _ in times:
        assert sum(amount for at, amount in times if start <= at < start + WINDOW_S) <= limit
    assert sum(amount for _, amount in times) >= 0.9 * limit * (times[-1][0] - times[0][0]) / (WINDOW_S + 1)


class Clock:
    """Time that the test sets; Redis has its own."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        self.s += 1.0  # a refusal is not believed for longer than MAX_TRUST_S
        return self.s


def quota(redis_url: str, keys: Keys, router: str, kind: str, limit: int, now_s: Callable[[], float]) -> Quota:
    return Quota(SharedLimits(connect(redis_url), keys, router), "tenant", kind, limit, now_s)


async def used(each: Quota, amounts: list[int]) -> int:
    """What a router admits of requests that use these amounts."""
    total = 0
    for amount in amounts:
        try:
            await each.take(amount)
        except RateLimited:
            continue
        total += amount
        await asyncio.sleep(0)
    return total


@pytest.mark.parametrize(
    ("limit", "prompts", "single"),
    [*((limit, 0, limit + 20) for limit in (1, 7, 60, 1_000, 5_000)), (100_000, 300, 1_500)],
)
async def test_two_routers_admit_a_limit_within_two_per_cent(
    redis: RedisProcess, limit: int, prompts: int, single: int
) -> None:
    """Of requests, and of the tokens of many prompts and some single ones."""
    keys, clock, rng = Keys(f"limits-{uuid.uuid4().hex[:8]}"), Clock(), random.Random(1)
    pair = [quota(redis.url, keys, name, "tokens" if prompts else "requests", limit, clock) for name in ("one", "two")]
    amounts = [[rng.randint(1, 900) for _ in range(prompts)] + [1] * single for _ in pair]
    began = time.monotonic()
    admitted = await asyncio.gather(*(used(each, part) for each, part in zip(pair, amounts, strict=True)))
    if time.monotonic() - began < WINDOW_S:  # on a machine that is slower, some of it is free again
        assert 0.98 * limit <= sum(admitted) <= limit, admitted
    if limit >= 60:
        assert min(admitted) > 0, "each has a part"


async def test_what_was_reserved_and_not_used_is_free_again_for_all(redis: RedisProcess) -> None:
    keys, clock = Keys(f"limits-{uuid.uuid4().hex[:8]}"), Clock()
    one, two = (quota(redis.url, keys, name, "tokens", 1_000, clock) for name in ("one", "two"))
    await one.take(1_000)
    with pytest.raises(RateLimited):
        await two.take(100)
    one.settle(-900)  # the reply had 100
    await one.give_back()
    await two.take(800)
    with pytest.raises(RateLimited):
        await two.take(200)
    _, remaining, reset_s = two.state()
    assert remaining <= 105
    assert 0 < reset_s <= WINDOW_S + 1


async def test_more_tokens_than_reserved_count_before_the_next_request(redis: RedisProcess) -> None:
    keys, clock = Keys(f"limits-{uuid.uuid4().hex[:8]}"), Clock()
    one, two = (quota(redis.url, keys, name, "tokens", 1_000, clock) for name in ("one", "two"))
    await one.take(10)
    one.settle(985)
    await one.give_back()
    for each in (one, two):
        with pytest.raises(RateLimited):
            await each.take(20)


async def test_without_redis_each_router_enforces_the_limit_alone(own_redis: RedisProcess) -> None:
    now = itertools.count(0, 0.1)
    each = quota(own_redis.url, Keys("limits"), "one", "requests", 20, lambda: next(now))
    own_redis.stop()
    assert await used(each, [1] * 60) == 20
    assert each.state()[1] <= 0


async def test_requests_at_once_are_limited_over_all_routers_and_forgotten_with_a_dead_one(redis: RedisProcess) -> None:
    keys = Keys(f"limits-{uuid.uuid4().hex[:8]}")
    one, two = (SharedLimits(connect(redis.url), keys, name) for name in ("one", "two"))
    assert await one.hold("tenant", 3, 4)
    assert await two.hold("tenant", 1, 4)
    assert not await two.hold("tenant", 2, 4)
    assert not await one.hold("tenant", 4, 4)
    assert await one.hold("tenant", 1, 4)
    assert await two.hold("tenant", 3, 4)
    await two.hold("tenant", 9, None)  # said in any case: it has them
    assert not await one.hold("tenant", 2, 4)
    client = connect(redis.url)
    await client.hset(keys.limit("tenant", "concurrency"), "two", "9:1")  # its time has passed
    assert await one.hold("tenant", 4, 4)
    await client.aclose()


async def test_usage_is_summed_by_key_tier_and_day(redis: RedisProcess) -> None:
    keys, now = Keys(f"usage-{uuid.uuid4().hex[:8]}"), 1_700_000_000.0
    client = connect(redis.url)
    store, of = UsageStore(client, keys), UsageOf("a", "k", "small")
    await store.add({of: {"requests": 1, "cost": 0.5}}, now)
    await store.add({of: {"requests": 2, "cost": 0.25}, UsageOf("b", "k2", "large"): {"requests": 1}}, now)
    await store.add({of: {"requests": 10}}, now - 86_400)
    await store.add({of: {"cost": math.nan, "tier_seconds": math.inf}}, now)
    assert (await store.read(1, now))[of] == {"requests": 3, "cost": 0.75}
    assert (await store.read(2, now))[of]["requests"] == 13
    assert set(await store.read(2, now)) == {of, UsageOf("b", "k2", "large")}
    await client.aclose()


def test_headers_have_openais_names_and_whole_numbers() -> None:
    assert rate_limit_headers({"requests": (60, 12.9, 3.25)}) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "12",
        "x-ratelimit-reset-requests": "3.250s",
    }
    assert rate_limit_headers({"tokens": (5, -3, -1.0)})["x-ratelimit-remaining-tokens"] == "0"
