"""A worker that loses only its own link to Redis: its streams go on, it stays usable, and it comes back.

The rule is in docs/reference/faults.md: the end of a lease stops new requests where there are others to take them; only the
stream itself ends a stream.
"""

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.services.domain.instances import Role
from tests.conftest import MeshFileMaker
from tests.support.mesh import TestMesh
from tests.support.present import present
from tests.support.proxy import TcpProxy
from tests.support.read_stream import ReadStream
from tests.support.services import RedisProcess
from tests.support.simulated_text import ENDLESS

LEASE_S = 1.0  # of the worker that loses its link
SLOW = {"overhead_ms": 10.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
MAX_TOKENS = 8000  # of a stream: more than a test reads
MORE_TOKENS = 50  # that each stream gets after the lease has ended
WORKERS = ("worker-0", "worker-1")


@pytest.fixture
async def proxy(redis: RedisProcess) -> AsyncIterator[TcpProxy]:
    port = present(urlsplit(redis.url).port)
    async with TcpProxy(port) as made:
        yield made


@pytest.fixture
async def mesh(
    redis: RedisProcess, proxy: TcpProxy, mesh_file: MeshFileMaker, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TestMesh]:
    """One tier; its first worker reaches Redis through the proxy, the other directly. Channels are swept all the time."""
    monkeypatch.setattr("penstock.router_service.compose.CHANNEL_SWEEP_S", 0.05)
    file = mesh_file([{"name": "large", "model": "sim", "simulated": SLOW}])
    made = TestMesh(file, redis.url)
    try:
        await made.start(Role.PLANNER, "planner-0")
        await made.start(Role.ROUTER, "router-0")
        made.redis_url = f"redis://127.0.0.1:{proxy.port}/0"
        await made.start(Role.WORKER, WORKERS[0], tier="large", lease_s=LEASE_S)
        made.redis_url = redis.url
        await made.start(Role.WORKER, WORKERS[1], tier="large")
        await made.complete()
        yield made
    finally:
        proxy.restore()
        await made.stop_all()


class Stream(ReadStream):
    """One reply, read until `leave`."""

    def __init__(self, mesh: TestMesh) -> None:
        super().__init__("hello")
        self._mesh = mesh
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """A failure ends the group."""
        self._task = tasks.create_task(self._run())

    def leave(self) -> None:
        present(self._task).cancel()

    async def grown(self, tokens: int) -> None:
        """Return once so many more tokens have come."""
        due = self.tokens + tokens
        while self.tokens < due:
            await asyncio.sleep(0.02)

    async def _run(self) -> None:
        async with self._mesh.client() as client:
            await self.read(client.stream(self.prompt, model="large", temperature=0, max_tokens=MAX_TOKENS))
        raise AssertionError("the reply ended by itself")


def instance_state(status: Any, name: str) -> str | None:
    return next((i.state for i in status.instances if i.instance_id == name), None)


async def health_of(address: str, service: str) -> int:
    async with aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    return int(response.status)


@pytest.mark.parametrize("fault", ["cut", "blackhole"])
async def test_a_worker_that_loses_only_its_redis_link_keeps_its_streams_and_comes_back(
    mesh: TestMesh, proxy: TcpProxy, fault: str
) -> None:
    """Its lease ends and channels are swept several times meanwhile; no stream fails over, none loses a token."""
    streams: list[Stream] = []
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        while {stream.instances[0] for stream in streams} != set(WORKERS):
            streams += (more := [Stream(mesh) for _ in range(4)])
            for stream in more:
                stream.start(tasks)
            await asyncio.gather(*(stream.grown(1) for stream in more))
        getattr(proxy, fault)()
        await mesh.until(lambda s: instance_state(s, WORKERS[0]) == "ejected")
        await asyncio.gather(*(stream.grown(MORE_TOKENS) for stream in streams))
        for stream in streams:
            stream.leave()
    assert not any(stream.changes for stream in streams)
    async with mesh.client() as client:
        assert (await client.status()).failovers == 0
    proxy.restore()
    await mesh.until(lambda s: instance_state(s, WORKERS[0]) == "ready")


async def test_new_requests_go_to_workers_with_a_lease_first_and_to_the_others_before_the_tier_is_given_up(
    mesh: TestMesh, proxy: TcpProxy
) -> None:
    """With a leased worker beside it the one without a lease gets nothing; alone, it gets everything."""
    proxy.cut()
    await mesh.until(lambda s: instance_state(s, WORKERS[0]) == "ejected")
    async with mesh.client() as client:
        for _ in range(4):
            reply = await client.generate("hello", model="large", max_tokens=2)
            assert [t.instance_id for t in reply.tiers] == [WORKERS[1]]
        await mesh.stop(WORKERS[1])
        for _ in range(4):
            reply = await client.generate("hello", model="large", max_tokens=2)
            assert [t.instance_id for t in reply.tiers] == [WORKERS[0]]


async def test_a_worker_says_that_it_has_no_link_to_redis(mesh: TestMesh, proxy: TcpProxy) -> None:
    """Metrics and gRPC health (`penstock.state`) have it; the worker as a whole goes on SERVING, also under its own id."""
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    worker = mesh.parts[WORKERS[0]]
    address = worker.address

    def connected_metric() -> float:
        with urllib.request.urlopen(f"http://{worker.telemetry.metrics_address}/metrics") as response:
            text = response.read().decode()
        return float(next(re.finditer(r"^penstock_state_connected\S* (\S+)$", text, re.MULTILINE)).group(1))

    assert await asyncio.to_thread(connected_metric) == 1
    assert await health_of(address, "penstock.state") == serving
    proxy.cut()
    async with asyncio.timeout(60):
        while await health_of(address, "penstock.state") != not_serving:
            await asyncio.sleep(0.02)
    assert await asyncio.to_thread(connected_metric) == 0
    assert await health_of(address, "") == serving
    assert await health_of(address, WORKERS[0]) == serving
    with pytest.raises(aio.AioRpcError) as failed:
        await health_of(address, WORKERS[1])
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND
    proxy.restore()
    async with asyncio.timeout(60):
        while await health_of(address, "penstock.state") != serving:
            await asyncio.sleep(0.02)
