"""What a refused request took is given back, what was used is counted once, and only our certificates name roles."""

import fcntl
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from opentelemetry.metrics import NoOpMeterProvider

from penstock.router_service.domain.events import RouterRequest
from penstock.router_service.tenancy import tenancy as module
from penstock.router_service.tenancy.key_follower import KeyFollower
from penstock.router_service.tenancy.tenancy import Tenancy, caller
from penstock.services.access.api_keys import KeyFile, new_key
from penstock.services.access.guard import certified_roles
from penstock.services.access.roles import CallerRole
from penstock.services.access.tenants import Caller
from penstock.services.domain.errors import RateLimited
from penstock.services.mesh_schema.access import MeshTenant
from penstock.services.state.connection import connect
from penstock.services.state.keys import Keys
from penstock.services.state.limits import SharedLimits
from penstock.services.state.usage import UsageOf, UsageStore
from penstock.types.events import Finished, TierSummary
from penstock.types.prompts import TextPrompt
from penstock.types.replies import FinishReason, Usage
from penstock.types.sampling import SamplingParams
from tests.support.services import RedisProcess
from tests.support.waiting import until, until_answered


class CountedStore(UsageStore):
    """Counts how often usage was to be added."""

    attempts = 0

    async def add(self, usage: Mapping[UsageOf, Mapping[str, float]], now: float) -> None:
        self.attempts += 1
        await super().add(usage, now)


@asynccontextmanager
async def tenancy_of(tenant: MeshTenant, url: str, folder: Path) -> AsyncIterator[tuple[Tenancy, CountedStore]]:
    """Tenancy as a router has it, with this tenant as the caller."""
    KeyFile(folder / "keys.json").add(new_key(tenant.name, time.time())[0])
    client, keys = connect(url), Keys(f"accounting-{os.urandom(4).hex()}")
    store, shared = CountedStore(client, keys), SharedLimits(client, keys, "router-0")
    meter = NoOpMeterProvider().get_meter("test")
    token = caller.set(Caller(tenant, "key"))
    try:
        async with Tenancy([tenant], KeyFollower(folder / "keys.json"), shared, store, meter, {}) as tenancy:
            yield tenancy, store
    finally:
        caller.reset(token)
        await client.aclose()


def request(name: str, tokens: int) -> RouterRequest:
    sampling = SamplingParams(max_tokens=tokens)
    return RouterRequest(name, "cascade", TextPrompt("hello"), sampling, deadline_s=1e9)


async def test_a_request_that_the_token_limit_refuses_takes_no_request_and_no_place(
    redis: RedisProcess, tmp_path: Path
) -> None:
    tenant = MeshTenant(name="a", requests_per_minute=10, tokens_per_minute=50, concurrency=3)
    async with tenancy_of(tenant, redis.url, tmp_path) as (tenancy, _), tenancy.admitted([request("first", 50)]):
        for name in ("second", "third", "fourth"):
            with pytest.raises(RateLimited, match="tokens") as refused:
                async with tenancy.admitted([request(name, 50)]):
                    pass
            assert refused.value.headers["x-ratelimit-remaining-requests"] == "9", name


async def test_usage_while_redis_is_away_is_counted_once_when_it_is_back(
    own_redis: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SYNC_S", 0.01)
    async with tenancy_of(MeshTenant(name="a"), own_redis.url, tmp_path) as (tenancy, store):
        own_redis.stop()
        async with tenancy.admitted([request("r", 5)]) as admission:
            used = Usage(7, 0, 5)
            tier = TierSummary("small", "m", "worker-0", None, None, accepted=True, usage=used, time_s=0.1)
            admission.finished(Finished(FinishReason.STOP, "small", used, (tier,), 0.1, 0.2, ""))
        await until(lambda: store.attempts >= 3)
        own_redis.start()
        (measures,) = (await until_answered(lambda: store.read(1, time.time()))).values()
        assert (measures["prompt_tokens"], measures["output_tokens"]) == (7, 5)
        attempts = store.attempts
    assert store.attempts == attempts, "nothing is left to tell"


def test_a_key_file_is_changed_by_one_at_a_time(tmp_path: Path) -> None:
    """Who changes it waits while another has the lock, as the kernel's table of locks shows, and loses no key."""
    file = KeyFile(tmp_path / "keys.json")
    file.add(new_key("first", 0.0)[0])
    lock_path = tmp_path / "keys.json.lock"
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # others may share it; who writes must not
        adding = threading.Thread(target=file.add, args=(new_key("second", 0.0)[0],))
        adding.start()
        inode = f":{lock_path.stat().st_ino} "
        while not any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()):
            assert adding.is_alive(), "it did not wait for the lock"
    adding.join()
    assert [key.tenant for key in file.read()] == ["first", "second"]


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        (b"spiffe://penstock/worker", {CallerRole.WORKER}),
        (b"spiffe://elsewhere/worker", set()),
        (b"https://penstock/worker", set()),
        (b"worker", set()),
        (b"worker.penstock", set()),
        (b"spiffe://penstock/client", set()),
        (b"spiffe://penstock/worker/admin", set()),
    ],
)
def test_a_certificate_gives_the_role_of_our_own_names_only(name: bytes, roles: set[CallerRole]) -> None:
    assert certified_roles({"x509_subject_alternative_name": [name]}) == roles
