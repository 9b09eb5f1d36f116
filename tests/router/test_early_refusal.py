"""Requests without room are refused before they are read."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from penstock import TierStarted
from tests.conftest import MeshFileMaker
from tests.support.mesh import TestMesh, running_mesh
from tests.support.services import RedisProcess

GENERATE = "/penstock.router.v1.RouterService/Generate"


@pytest.fixture
async def mesh(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[TestMesh]:
    slow = {"overhead_ms": 20.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 100_000}
    tiers = [{"name": "large", "model": "l", "simulated": slow, "kv_tokens": 100_000}]
    router = {"grpc_port": 0, "http_port": 0, "max_active": 1, "max_waiting": 0}
    async with running_mesh(mesh_file(tiers, router=router), redis.url) as running:
        yield running


async def refused(channel: aio.Channel, message: bytes) -> aio.AioRpcError:
    generate: Any = channel.unary_stream(GENERATE)
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in generate(message, timeout=60):
            pass
    return caught.value


async def test_a_full_router_refuses_whatever_comes_without_reading_it(mesh: TestMesh) -> None:
    """With a time to wait, and counted; on both protocols. With room the same bytes are refused for what they are."""
    garbage = b"\xff\xff"
    async with (
        mesh.client() as client,
        aiohttp.ClientSession() as session,
        aio.insecure_channel(mesh.router.address) as channel,
    ):
        url, before = f"{mesh.http}/v1/chat/completions", (await client.status()).rejected
        headers = {"Content-Type": "application/json"}
        events = client.stream("hello", model="large", temperature=0)
        async for event in events:
            if isinstance(event, TierStarted):
                break
        error: Any = await refused(channel, garbage)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status, info = rpc_status.from_call(error), error_details_pb2.RetryInfo()
        assert status is not None
        assert any(detail.Unpack(info) for detail in status.details)
        assert info.retry_delay.ToMilliseconds() >= 100
        async with session.post(url, data=garbage, headers=headers) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "overloaded"
        after = await client.status()
        assert (after.rejected - before, after.failed) == (2, 0)
        await events.aclose()  # type: ignore[attr-defined]
        await mesh.until(lambda s: s.active == 0)
        assert (await refused(channel, garbage)).code() is grpc.StatusCode.INVALID_ARGUMENT
        async with session.post(url, data=garbage, headers=headers) as response:
            assert response.status == 400
