"""Many streams at once through one router: each is served or refused with a time to come again, and all are counted."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from penstock import AsyncClient, MeshStatus
from penstock.local import LocalMesh, MeshOptions
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc

STREAMS, MAX_ACTIVE, MAX_WAITING, TOKENS = 1000, 128, 128, 16


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalMesh]:
    folder = tmp_path_factory.mktemp("storm")
    # A reply takes 3 s, long enough for all streams to be opened meanwhile, and few messages: those are not what is tested.
    latency = {"overhead_ms": 200.0, "token_us": 20.0, "context_token_ns": 0.0, "reply_tokens": 1_000_000}
    tier = {"name": "large", "model": "sim-l", "engine": "simulated", "simulated": latency}
    content = {
        "name": "test-storm",
        "tiers": [tier | {"workers": 2, "max_running": 128, "max_queued": 128, "kv_tokens": 400_000}],
        "judge": {"scorers": [{"name": "confidence", "kind": "confidence"}], "default_scorer": "confidence"},
        "router": {"grpc_port": 0, "http_port": 0, "max_active": MAX_ACTIVE, "max_waiting": MAX_WAITING},
    }
    file = folder / "mesh.yaml"
    file.write_text(yaml.safe_dump(content))
    async with LocalMesh(MeshOptions(file, folder)) as running:
        yield running


async def status(mesh: LocalMesh) -> MeshStatus:
    async with AsyncClient(mesh.grpc_addresses[0], admin=mesh.admin_addresses[0]) as client:
        return await client.status()


def hint_s(error: aio.AioRpcError) -> float:
    """The time to wait; KeyError where there is none."""
    call: Any = error
    found = rpc_status.from_call(call)
    info = error_details_pb2.RetryInfo()
    if found is None or not any(detail.Unpack(info) for detail in found.details):
        raise KeyError("RetryInfo")
    milliseconds: int = info.retry_delay.ToMilliseconds()
    return milliseconds / 1000


@pytest.mark.parametrize("channels", [10, STREAMS])
async def test_a_thousand_streams_at_once_are_served_or_refused_and_counted(mesh: LocalMesh, channels: int) -> None:
    """None breaks. All that have no room are told so before the first reply has ended, with RetryInfo."""
    before = await status(mesh)
    opened = [
        aio.insecure_channel(mesh.grpc_addresses[0], options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(channels)
    ]
    ends, hints, order = Counter[str](), list[float](), list[str]()

    async def one(i: int) -> None:
        stub: Any = router_pb2_grpc.RouterServiceStub(opened[i % channels])
        request = pb.GenerateRequest(
            model="large",
            prompt=common_pb2.Prompt(text=f"prompt {i}"),
            sampling=common_pb2.SamplingParams(max_output_tokens=TOKENS, seed=i),
        )
        tokens = 0
        try:
            async for event in stub.Generate(request, timeout=150):
                if event.HasField("tokens"):
                    assert event.tokens.frame.offset == tokens, "a token twice, or one missing"
                    tokens += len(event.tokens.frame.token_ids)
                end = "finished" if event.HasField("finished") else "unfinished"
        except aio.AioRpcError as error:
            end = error.code().name
            hints.append(hint_s(error))
        ends[end] += 1
        order.append(end)

    await asyncio.gather(*(one(i) for i in range(STREAMS)))
    for channel in opened:
        await channel.close()
    assert set(ends) == {"finished", "RESOURCE_EXHAUSTED"}
    assert ends["finished"] >= MAX_ACTIVE + MAX_WAITING
    refused = ends["RESOURCE_EXHAUSTED"]
    assert refused > 0
    assert order.index("finished") >= refused * 0.9, "what has no room is told so late"
    assert all(hint > 0.1 for hint in hints)
    after = await status(mesh)
    assert after.rejected - before.rejected == refused
    assert after.failed == before.failed == 0
    assert after.finished - before.finished == ends["finished"]
    assert (after.active, after.waiting) == (0, 0)
