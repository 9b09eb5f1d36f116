"""MigrateOut and MigrateIn between two workers over gRPC; the test plays the router."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from grpc import aio

from penstock.common.v1 import common_pb2
from penstock.worker.v1 import worker_pb2 as pb
from penstock.worker.v1 import worker_pb2_grpc
from services.domain import Role
from services.runtime import Chassis
from services.testing import RedisProcess, serving
from tests.conftest import FAMILY, MeshFileMaker
from tests.support.mesh import COMPOSE

if TYPE_CHECKING:
    Stub = worker_pb2_grpc.WorkerServiceAsyncStub
else:
    Stub = worker_pb2_grpc.WorkerServiceStub

TOKENS = 400


@pytest.fixture(params=["torch", "simulated"])
async def pair(
    request: pytest.FixtureRequest, redis: RedisProcess, mesh_file: MeshFileMaker
) -> AsyncIterator[tuple[Stub, Stub, Chassis]]:
    """Source, target, and the target's chassis."""
    model = str(FAMILY / "small") if request.param == "torch" else "sim"
    file = mesh_file([{"name": "only", "model": model, "engine": request.param, "max_running": 4, "max_queued": 4}])
    async with (
        serving(Role.WORKER, COMPOSE[Role.WORKER], file, redis.url, tier="only") as one,
        serving(Role.WORKER, COMPOSE[Role.WORKER], file, redis.url, tier="only") as two,
        aio.insecure_channel(one.address) as to_one,
        aio.insecure_channel(two.address) as to_two,
    ):
        yield worker_pb2_grpc.WorkerServiceStub(to_one), worker_pb2_grpc.WorkerServiceStub(to_two), two


def asked(name: str = "r", transfer: str | None = None, **sampling: Any) -> pb.GenerateRequest:
    params = common_pb2.SamplingParams(
        **{"temperature": 0.0, "max_output_tokens": TOKENS, "ignore_eos": True, **sampling}
    )
    prompt = common_pb2.Prompt(text="Count from 3 to 31 by 4.")
    return pb.GenerateRequest(request_id=name, prompt=prompt, sampling=params, transfer_id=transfer)


async def read(call: Any, until: str = "") -> tuple[list[int], pb.GenerateResponse]:
    """Tokens, and the event that ended it: the last, or the first of a kind."""
    tokens: list[int] = []
    event = pb.GenerateResponse()
    async for event in call:
        kind = event.WhichOneof("event")
        if kind == "tokens":
            tokens += event.tokens.token_ids
        if kind == until:
            break
    return tokens, event


async def idle(*stubs: Stub) -> None:
    """Return once the workers hold nothing."""
    async with asyncio.timeout(10):
        for stub in stubs:
            whole = (await stub.GetInfo(pb.GetInfoRequest())).kv_blocks
            while (await stub.GetLoad(pb.GetLoadRequest())).free_kv_blocks < whole:
                await asyncio.sleep(0.01)


async def test_a_reply_moves_and_goes_on_at_the_next_token(pair: tuple[Stub, Stub, Chassis]) -> None:
    source, target, place = pair
    whole, _ = await read(source.Generate(asked()))
    call = source.Generate(asked())
    first, _ = await read(call, "tokens")
    claim = target.Generate(asked(transfer="t"))
    await read(claim, "heartbeat")
    order = pb.MigrateOutRequest(request_id="r", transfer_id="t", target_address=place.address)
    reports = [report async for report in source.MigrateOut(order)]
    assert {r.WhichOneof("event") for r in reports[:-1]} <= {"round_copied"}
    assert reports[-1].WhichOneof("event") == "handed_over"
    rest, last = await read(call)
    assert last.handed_over.offset == len(first + rest) == reports[-1].handed_over.offset
    assert reports[-1].handed_over.stall.ToMicroseconds() > 0
    moved, end = await read(claim)
    assert end.finished.usage.output_tokens == TOKENS
    assert first + rest + moved == whole
    assert moved
    await idle(source, target)
