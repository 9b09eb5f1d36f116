"""Tenants at a running mesh: by gRPC and HTTP, with real keys, over two routers."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock import (
    AsyncClient,
    AuthenticationError,
    InvalidRequestError,
    OverloadedError,
    PenstockError,
    PermissionDeniedError,
    RetryPolicy,
)
from penstock.services.access.api_keys import KeyFile, new_key
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.instances import Role
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema.access import MeshTenant
from penstock.services.state.connection import connect
from penstock.types.mesh_status import TenantUsage
from penstock.types.sampling import SamplingParams
from tests.conftest import MeshFileMaker, MeshRunner
from tests.support.cli import penstock
from tests.support.held_engine import held_engines
from tests.support.mesh import TestMesh
from tests.support.services import RedisProcess
from tests.support.waiting import until, until_answered

PROMPT = "a prompt that no log may have"
TENANTS: list[dict[str, Any]] = [
    {"name": "open"},
    {"name": "few", "requests_per_minute": 3, "tokens_per_minute": 5_000},
    {"name": "small", "models": ["small"], "max_tokens": 8, "max_n": 2, "max_priority": 0, "slo": False},
    {"name": "single", "concurrency": 1},
    {"name": "tokens", "tokens_per_minute": 60},
    {"name": "secret", "own_cache": True},
    {"name": "secret2", "own_cache": True},
]
NO_RETRY = RetryPolicy(attempts=1)


def with_keys(folder: Path, *tenants: str) -> tuple[KeyFile, dict[str, str]]:
    """A file with a key of each tenant, and the keys."""
    file, keys = KeyFile(folder / "keys.json"), {}
    for tenant in tenants:
        key, keys[tenant] = new_key(tenant, time.time())
        file.add(key)
    return file, keys


@dataclass
class Keyed:
    """A mesh of two routers that need keys. keys: by tenant."""

    mesh: TestMesh
    file: KeyFile
    keys: dict[str, str] = field(default_factory=dict)

    def client(self, key: str | None, router: int = 0) -> AsyncClient:
        chassis = self.mesh.parts[f"router-{router}"]
        return AsyncClient(chassis.address, admin=chassis.admin_address, api_key=key, retry=NO_RETRY, timeout_s=60)

    def url(self, path: str, router: int = 0) -> str:
        return f"http://{self.mesh.parts[f'router-{router}'].http_address}{path}"


@pytest.fixture
async def keyed(run_mesh: MeshRunner, tmp_path: Path) -> AsyncIterator[Keyed]:
    tiers = [
        {"name": "small", "model": "s", "threshold": 50, "prompt_price": 1.0, "output_price": 10.0},
        {"name": "large", "model": "l", "prompt_price": 100.0, "simulated": {"reply_tokens": 1_000_000}},
    ]
    file, keys = with_keys(tmp_path, *(each["name"] for each in TENANTS), "gone")
    async with run_mesh(tiers, access={"keys": "keys.json", "tenants": TENANTS}, routers=2) as mesh:
        yield Keyed(mesh, file, keys)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "cascade", "messages": [{"role": "user", "content": PROMPT}], **fields}


async def posted(
    keyed: Keyed, tenant: str, body: dict[str, Any], router: int = 0, path: str = "/v1/chat/completions"
) -> tuple[int, Any, Any]:
    """(status, body, headers)."""
    headers = {"Authorization": f"Bearer {keyed.keys[tenant]}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(keyed.url(path, router), json=body) as response,
    ):
        text = await response.text()
        return response.status, json.loads(text) if not body.get("stream") else text, response.headers


async def test_only_a_valid_key_opens_the_mesh(keyed: Keyed) -> None:
    """Missing, wrong and of a tenant that the mesh file does not have, by gRPC and HTTP; health needs no key."""
    _, stranger = new_key("open", time.time())
    for key in (None, "", "x", stranger, keyed.keys["gone"], "psk-" + "x" * 7_000):
        async with keyed.client(key) as client:
            for call in (client.generate("hello", max_tokens=4), client.models()):
                with pytest.raises(AuthenticationError):
                    await call
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for method, path in (("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models")):
                async with session.request(method, keyed.url(path), data=b"{}") as response:
                    assert response.status == 401, (key, path)
                    error = (await response.json())["error"]
                    assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
            for path in ("/livez", "/readyz", "/health"):
                async with session.get(keyed.url(path)) as response:
                    assert response.status == 200
    async with keyed.client(keyed.keys["open"]) as client:
        assert (await client.generate("hello", max_tokens=4)).usage.output_tokens == 4


async def test_a_revoked_key_is_refused_and_a_new_one_works_without_a_restart(
    keyed: Keyed, caplog: pytest.LogCaptureFixture
) -> None:
    key, text = new_key("open", time.time())
    async with keyed.client(text) as client:
        keyed.file.add(key)
        await until_answered(lambda: _serves(client))
        keyed.file.revoke(key.key_id, time.time())
        await until_answered(lambda: _serves(client, refused=True))
        keyed.file.path.write_text("no key file")  # what was known stays
        await until(lambda: caplog.text.count("the API keys stay as they were") >= 2)  # both routers have looked
        async with keyed.client(keyed.keys["open"]) as other:
            await other.models()


async def _serves(client: AsyncClient, *, refused: bool = False) -> bool:
    """Whether its key is valid. refused: whether it is not."""
    try:
        await client.models()
    except AuthenticationError:
        return refused
    return not refused


async def test_a_tenant_has_its_models_and_its_limits(keyed: Keyed) -> None:
    async with keyed.client(keyed.keys["small"]) as client:
        assert [model.id for model in await client.models()] == ["small"]
        with pytest.raises(PermissionDeniedError):
            await client.generate("hello")
        cases: list[tuple[str, dict[str, Any]]] = [
            ("sampling.max_tokens", {"max_tokens": 9}),
            ("priority", {"priority": 1}),
        ]
        for field_name, options in cases:
            with pytest.raises(InvalidRequestError) as caught:
                await client.generate("hello", model="small", **options)
            assert list(caught.value.fields) == [field_name]
        replies = [await client.generate(f"prompt {i}", model="small") for i in range(12)]
        assert max(r.usage.output_tokens for r in replies) == 8, "its limit, where requests set none: 24 on average"
    status, body, _ = await posted(keyed, "small", chat())
    assert (status, body["error"]["type"]) == (403, "permission_error")
    status, body, _ = await posted(keyed, "small", chat(model="small", n=3))
    assert (status, body["error"]["param"]) == (400, "n")
    status, body, _ = await posted(keyed, "small", chat(model="small", max_tokens=9))
    assert (status, body["error"]["param"]) in ((400, "max_tokens"), (400, "max_completion_tokens"))
    status, body, _ = await posted(keyed, "small", chat(model="small", n=2))
    assert (status, len(body["choices"])) == (200, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_are_limited_over_both_routers_with_openais_headers(keyed: Keyed, stream: bool) -> None:
    remaining = []
    for router in (0, 1, 0):
        status, _, headers = await posted(keyed, "few", chat(model="small", max_tokens=2, stream=stream), router)
        assert status == 200
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-limit-tokens"]) == ("3", "5000")
        remaining.append(int(headers["x-ratelimit-remaining-requests"]))
    assert remaining == [2, 1, 0]
    for router in (0, 1):
        status, body, headers = await posted(keyed, "few", chat(model="small"), router)
        assert (status, body["error"]["code"], body["error"]["type"]) == (
            429,
            "rate_limit_exceeded",
            "rate_limit_error",
        )
        assert 0 < int(headers["Retry-After"]) <= 61
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert headers["x-ratelimit-reset-requests"].endswith("s")
    async with keyed.client(keyed.keys["few"], 1) as client:
        with pytest.raises(OverloadedError) as caught:
            await client.generate("hello")
        assert caught.value.reason == "RATE_LIMIT_EXCEEDED"
        assert 0 < caught.value.retry_after_s <= 61
    assert (await posted(keyed, "open", chat(model="small")))[0] == 200, "others are not affected"


async def test_a_stream_that_ends_in_an_error_event_costs_no_tokens(run_mesh: MeshRunner, tmp_path: Path) -> None:
    """Its deadline passes in the queue, where its status has been sent already; what it had reserved is free again."""
    file, keys = with_keys(tmp_path, "open", "tokens")
    async with run_mesh(
        [{"name": "only", "model": "s"}],
        judge={"replicas": 0},
        router={"max_active": 1, "max_waiting": 1, "default_deadline_s": 2.0},
        access={"keys": "keys.json", "tenants": [{"name": "open"}, {"name": "tokens", "tokens_per_minute": 60}]},
    ) as mesh:
        keyed = Keyed(mesh, file, keys)
        async with keyed.client(keys["open"]) as first, keyed.client(keys["tokens"]) as client:
            with held_engines() as proceed:
                running = asyncio.create_task(first.generate("hello", max_tokens=8))
                await mesh.until(lambda status: status.active == 1)
                status, events, _ = await posted(keyed, "tokens", chat(model="only", stream=True, max_tokens=40))
                proceed.set()
            assert status == 200
            assert "deadline_exceeded" in events
            await running
            await client.generate("hello", max_tokens=40)
            with pytest.raises(OverloadedError, match="tokens per minute"):
                await client.generate("hello", max_tokens=40)


async def test_requests_at_once_are_limited_over_both_routers(keyed: Keyed) -> None:
    """And free again, also for the other router, when the running one ends."""
    async with keyed.client(keyed.keys["single"], 0) as one, keyed.client(keyed.keys["single"], 1) as two:
        stream = one.stream("hello", model="large", max_tokens=4_000)
        await anext(aiter(stream))
        for client in (one, two):
            with pytest.raises(OverloadedError, match="1 requests running"):
                await client.generate("hello")
        await stream.aclose()  # type: ignore[attr-defined]

        async def is_free() -> bool:
            with suppress(OverloadedError):
                return bool(await two.generate("hello", model="small", max_tokens=2))
            return False

        await until_answered(is_free)


async def test_usage_is_counted_by_key_and_tier_with_its_cost(keyed: Keyed) -> None:
    async with keyed.client(keyed.keys["open"]) as client:
        replies = [await client.generate("hello", model="small", max_tokens=5) for _ in range(2)]

        async def counted() -> list[TenantUsage]:
            return [row for row in await client.usage() if row.tenant == "open" and row.requests == 2]

        (row,) = await until_answered(counted)
    prompt_tokens = sum(reply.usage.prompt_tokens for reply in replies)
    assert (row.tier, row.requests, row.prompt_tokens, row.output_tokens) == ("small", 2, prompt_tokens, 10)
    assert row.cost == pytest.approx((prompt_tokens * 1.0 + 10 * 10.0) / 1e6)
    assert 0 < row.compute_s <= row.tier_s
    assert row.key_id in keyed.keys["open"]
    command = ("usage", "--admin", keyed.mesh.router.admin_address)
    assert "open" in (await asyncio.to_thread(penstock, *command, columns=160)).output
    shown = await asyncio.to_thread(penstock, *command, "--json")
    assert json.loads(shown.output)[0]["output_tokens"] == 10


async def test_logs_traces_and_redis_have_no_prompt_and_no_key(
    keyed: Keyed, redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """After requests that were served, refused and judged, all of them traced."""
    caplog.set_level(logging.DEBUG)
    for tenant in keyed.keys:
        await posted(keyed, tenant, chat(max_tokens=4))
        await posted(keyed, tenant, chat(model=PROMPT, temperature=9))
        async with keyed.client(keyed.keys[tenant]) as client:
            for options in ({"trace": True}, {"temperature": 9}, {"model": "nothing"}):
                with suppress(PenstockError):
                    await client.generate(PROMPT, max_tokens=4, **options)
    async with keyed.client(keyed.keys["open"]) as client:
        await until_answered(lambda: client.traces(5))
    secrets = [key.split("-", 2)[2] for key in keyed.keys.values()]
    store = connect(redis.url)
    texts = [caplog.text]
    prefix = keyed.mesh.router.keys.mesh
    async for key in store.scan_iter(match=f"{prefix}:*"):
        texts.append(repr(await store.dump(key)) + repr(key))
        kind = await store.type(key)
        if kind == b"stream":
            texts.append(repr(await store.xrange(key)))
        elif kind == b"string":
            texts.append(repr(await store.get(key)))
        elif kind == b"hash":
            texts.append(repr(await store.hgetall(key)))
    await store.aclose()
    assert len(texts) > 5
    for text in texts:
        for secret in (*secrets, PROMPT):
            assert secret not in text


async def test_a_router_whose_key_file_is_missing_does_not_start(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    mesh = TestMesh(mesh_file(access={"keys": "missing.json", "tenants": [{"name": "a"}]}), redis.url)
    with pytest.raises(SettingsError, match=r"access\.keys: .*missing\.json"):
        await mesh.start(Role.ROUTER, "router-0")


def test_only_tenants_with_the_right_may_ignore_the_end_token() -> None:
    """It keeps a place for as many tokens as are asked for, whatever the model says: for benchmarks."""
    endless = SamplingParams(ignore_eos=True)
    with pytest.raises(InvalidRequest, match=r"sampling\.ignore_eos: not for tenant 'plain'"):
        MeshTenant(name="plain").check("cascade", endless, 1, 0, slo_class=None)
    MeshTenant(name="bench", ignore_eos=True).check("cascade", endless, 1, 0, slo_class=None)


async def test_texts_to_tokenize_count_as_requests_with_their_tokens(keyed: Keyed) -> None:
    """The worker computes them, too. A text that is refused counts nothing."""

    async def tokenize(tenant: str, text: str, **fields: Any) -> tuple[int, Any, Any]:
        return await posted(keyed, tenant, {"model": "small", "prompt": text, **fields}, path="/tokenize")

    status, reply, headers = await tokenize("few", "hello")
    assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "2")
    body = {"model": "small", "tokens": reply["tokens"]}
    status, _, headers = await posted(keyed, "few", body, path="/detokenize")
    assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "1")
    assert (await tokenize("few", "hello"))[0] == 200
    status, reply, headers = await tokenize("few", "hello")
    assert (status, reply["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (await posted(keyed, "few", chat(model="small")))[0] == 429
    status, reply, _ = await tokenize("tokens", "x" * 50)
    assert (status, reply["count"] > 15) == (200, True), "more than a quarter of a token per character"
    assert (await tokenize("tokens", "x" * 4 * (61 - reply["count"])))[0] == 429
    assert (await tokenize("small", "hello", model="large"))[0] == 403
    assert (await tokenize("open", "hello"))[0] == 200, "others are not affected"


async def test_a_tenant_with_its_own_cache_shares_it_with_nobody(keyed: Keyed) -> None:
    """Not even with a tenant that gives what its salt is to workers. Within a tenant, salts part caches as well."""
    messages = [{"role": "user", "content": "x" * 400}]

    async def cached(tenant: str, salt: str | None = None) -> int:
        """Tokens of the prompt that were known, by HTTP."""
        body = chat(model="small", messages=messages, max_tokens=4, ignore_eos=False)
        status, reply, _ = await posted(keyed, tenant, body | ({} if salt is None else {"cache_salt": salt}))
        assert status == 200, reply
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached("secret") == 0
    assert await cached("secret") > 0
    assert await cached("open") == 0
    assert await cached("open", "secret/") == 0
    assert await cached("secret2") == 0
    assert await cached("secret", "a") == 0
    assert await cached("secret", "a") > 0
    assert await cached("open") > 0
    assert await cached("few") > 0, "tenants without their own share one"


async def test_a_salt_has_a_limit(keyed: Keyed) -> None:
    """By gRPC and HTTP, in chats, completions and responses; the error names the field."""
    salt = "s" * 129
    async with keyed.client(keyed.keys["open"]) as client:
        with pytest.raises(InvalidRequestError, match="cache_salt: must have at most 128 characters, not 129"):
            await client.generate(PROMPT, cache_salt=salt)
        assert (await client.generate(PROMPT, model="small", max_tokens=2, cache_salt=salt[1:])).tier == "small"
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": chat(),
        "/v1/completions": {"model": "small", "prompt": PROMPT},
        "/v1/responses": {"model": "small", "input": PROMPT},
    }
    for path, body in bodies.items():
        status, reply, _ = await posted(keyed, "open", body | {"cache_salt": salt}, path=path)
        assert (status, reply["error"]["param"]) == (400, "cache_salt"), path
