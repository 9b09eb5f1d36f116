"""WorkerService over gRPC: its own RPCs; Generate is tested through the router as well."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc import aio

from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.services.domain.errors import InvalidRequest
from penstock.services.errors import from_rpc
from penstock.services.field_problems import SettingsError
from penstock.services.runtime import Chassis
from penstock.worker_service.text.tokenizer import ByteTokenizer
from tests.conftest import FAMILY, MeshFileMaker
from tests.support.held_engine import held_engines
from tests.support.measured import metrics_page
from tests.support.mesh import Stub, served_worker
from tests.support.services import RedisProcess


@pytest.fixture(params=["torch", "simulated"])
async def stub_and_worker(
    request: pytest.FixtureRequest, redis: RedisProcess, mesh_file: MeshFileMaker
) -> AsyncIterator[tuple[Stub, Chassis]]:
    model = str(FAMILY / "small") if request.param == "torch" else "sim"
    file = mesh_file([{"name": "only", "model": model, "engine": request.param, "max_running": 4, "max_queued": 1}])
    async with served_worker(file, redis.url) as both:
        yield both


@pytest.fixture
def stub(stub_and_worker: tuple[Stub, Chassis]) -> Stub:
    return stub_and_worker[0]


def asked(name: str = "r", **sampling: object) -> pb.GenerateRequest:
    params = common_pb2.SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return pb.GenerateRequest(request_id=name, prompt=common_pb2.Prompt(text="hello"), sampling=params)


async def test_how_long_tokens_may_wait_is_checked(stub: Stub) -> None:
    request = asked()
    request.output_interval.FromSeconds(-1)
    with pytest.raises(aio.AioRpcError) as caught:
        [event async for event in stub.Generate(request)]
    refused = from_rpc(caught.value)
    assert isinstance(refused, InvalidRequest)
    assert refused.problems[0].field == "output_interval"


async def test_tokens_of_a_reply_that_nobody_streams_come_in_fewer_frames(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first at once, the next sixteen as a sign of progress, the rest at the end."""
    monkeypatch.setattr("penstock.worker_service.engine.held_tokens.MAX_INTERVAL_S", 3600.0)
    request = asked(max_tokens=60)
    request.output_interval.FromSeconds(3600)
    async with asyncio.timeout(60):
        frames = [event.tokens async for event in stub.Generate(request) if event.HasField("tokens")]
    assert sum(len(frame.token_ids) for frame in frames) == 60
    assert len(frames[0].token_ids) == 1
    assert len(frames) <= 3


async def test_heartbeats_come_however_long_a_step_takes(
    redis: RedisProcess, mesh_file: MeshFileMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread is inside one step all the time."""
    monkeypatch.setattr("penstock.worker_service.compose.HEARTBEAT_S", 0.02)
    file = mesh_file([{"name": "only", "model": "sim"}])
    async with served_worker(file, redis.url) as (stub, _), asyncio.timeout(60):
        with held_engines() as proceed:
            beats, call = 0, stub.Generate(asked())
            async for event in call:
                beats += event.HasField("alive")
                if beats == 5:
                    assert not proceed.is_set()
                    break
        call.cancel()


async def test_info_and_load_tell_what_is_there(stub: Stub) -> None:
    info = await stub.GetInfo(pb.GetInfoRequest())
    assert info.tier == "only"
    assert info.max_context_tokens > 0
    assert pb.CAPABILITY_DRAFTS in info.capabilities
    missing = set(pb.Capability.values()) - {*info.capabilities}
    others = {pb.CAPABILITY_SLO, pb.CAPABILITY_SLO_PREDICTED, pb.CAPABILITY_ADAPTER}
    assert missing == {pb.CAPABILITY_UNSPECIFIED} | others, "its tier keeps no SLOs and has no adapter"
    load = await stub.GetLoad(pb.GetLoadRequest())
    assert list(load.running_tokens) == []
    assert load.free_kv_blocks == info.kv_blocks
    assert not load.draining


async def test_abort_ends_the_stream_and_is_no_error_for_nobody(stub: Stub) -> None:
    call = stub.Generate(asked(max_tokens=1500))
    async for event in call:
        if event.HasField("tokens"):
            break
    assert (await stub.Abort(pb.AbortRequest(request_id="r"))).aborted
    *_, last = [event async for event in call]
    assert last.finished.reason == common_pb2.FINISH_REASON_ABORTED
    assert not (await stub.Abort(pb.AbortRequest(request_id="r"))).aborted
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Abort(pb.AbortRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_requests_that_cannot_be_computed_are_counted(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """By the worker's metrics page, under the tier."""
    file = mesh_file([{"name": "only", "model": "sim", "engine": "simulated"}])

    def failing(_: ByteTokenizer) -> None:
        raise RuntimeError("a secret")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByteTokenizer, "stream", failing)  # every text fails
        async with served_worker(file, redis.url) as (stub, chassis):
            for name in ("a", "b"):
                with pytest.raises(aio.AioRpcError) as caught:
                    [event async for event in stub.Generate(asked(name))]
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert "secret" not in str(caught.value)
            page = await asyncio.to_thread(metrics_page, chassis.telemetry.metrics_address)
    (line,) = [line for line in page.splitlines() if line.startswith("penstock_worker_failed_requests_total{")]
    assert 'penstock_tier="only"' in line
    assert line.endswith(" 2.0")


async def test_a_worker_without_a_tier_or_model_does_not_start(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    file = mesh_file([{"name": "only", "model": "nowhere", "engine": "torch"}])
    for tier, said in (("", "PENSTOCK_TIER"), ("other", "no tier 'other'"), ("only", r"no folder")):
        with pytest.raises(SettingsError, match=said):
            async with served_worker(file, redis.url, tier=tier):
                pass
