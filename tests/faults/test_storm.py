"""Many streams at once through one router: each is served or refused with a time to come again, and all are counted."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio

from penstock.client.errors import OverloadedError, from_rpc
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from tests.conftest import MeshFileMaker
from tests.support.held_engine import held_engines
from tests.support.mesh import TestMesh, running_mesh
from tests.support.services import RedisProcess
from tests.support.simulated_text import ENDLESS

STREAMS, MAX_ACTIVE, MAX_WAITING, TOKENS = 1000, 128, 128, 4
MODEL = "sim-storm"
LIMIT_S = 500.0


@pytest.fixture
async def mesh(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[TestMesh]:
    latency = {"overhead_ms": 1.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
    room = {"max_running": 128, "max_queued": 128, "kv_tokens": 400_000}
    tier = {"name": "large", "model": MODEL, "simulated": latency, "workers": 2, **room}
    router = {"grpc_port": 0, "http_port": 0, "max_active": MAX_ACTIVE, "max_waiting": MAX_WAITING}
    async with running_mesh(mesh_file([tier], router=router), redis.url) as running:
        yield running


class Storm:
    """Streams over connections, and how each ended."""

    def __init__(self, mesh: TestMesh, channels: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channels = [aio.insecure_channel(mesh.router.address, options=options) for _ in range(channels)]
        self.ends, self.hints_s = Counter[str](), list[float]()
        self.refused_all = asyncio.Event()
        """Set once no more than the router has room for are left."""

    async def stream(self, number: int) -> None:
        stub: Any = router_pb2_grpc.RouterServiceStub(self.channels[number % len(self.channels)])
        request = pb.GenerateRequest(
            model="large",
            prompt=common_pb2.Prompt(text=f"prompt {number}"),
            sampling=common_pb2.SamplingParams(max_tokens=TOKENS, seed=number),
        )
        tokens, end = 0, "unfinished"
        try:
            async for event in stub.Generate(request, timeout=LIMIT_S):
                if event.HasField("tokens"):
                    assert event.tokens.frame.offset == tokens, "a token twice, or one missing"
                    tokens += len(event.tokens.frame.token_ids)
                end = "finished" if event.HasField("finished") else "unfinished"
        except aio.AioRpcError as error:
            end = error.code().name
            refused = from_rpc(error)
            assert isinstance(refused, OverloadedError)
            self.hints_s.append(refused.retry_after_s)
        self.ends[end] += 1
        if self.ends.total() == STREAMS - MAX_ACTIVE - MAX_WAITING:
            self.refused_all.set()


@pytest.mark.parametrize("channels", [10, pytest.param(STREAMS, marks=pytest.mark.slow)])
async def test_a_thousand_streams_at_once_are_served_or_refused_and_counted(mesh: TestMesh, channels: int) -> None:
    """None breaks. All that have no room are told so, with RetryInfo, while no reply has ended."""
    storm = Storm(mesh, channels)
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as streams:
        with held_engines(MODEL):
            for number in range(STREAMS):
                streams.create_task(storm.stream(number))
            await storm.refused_all.wait()
            assert set(storm.ends) == {"RESOURCE_EXHAUSTED"}
    for channel in storm.channels:
        await channel.close()
    served = MAX_ACTIVE + MAX_WAITING
    assert storm.ends == {"finished": served, "RESOURCE_EXHAUSTED": STREAMS - served}
    assert all(hint > 0.1 for hint in storm.hints_s)
    async with mesh.client() as client:
        status = await client.status()
    assert (status.rejected, status.finished, status.failed) == (STREAMS - served, served, 0)
    assert (status.active, status.waiting) == (0, 0)
