"""PlaceBid and ConfirmBid over gRPC: queue, turns, starvation, and an agent that goes away."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services.domain.instances import Role
from penstock.services.domain.stages.bidding import MAX_TRANSFERS, STARVED_AFTER
from penstock.services.runtime import Chassis
from tests.conftest import MeshFileMaker
from tests.support.mesh import COMPOSE
from tests.support.services import RedisProcess, serving


@pytest.fixture
async def worker(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[tuple[Any, str, Chassis]]:
    """A worker's stub, its model's digest, and the worker."""
    file = mesh_file([{"name": "only", "model": "sim", "kv_tokens": 1024, "kv_block_tokens": 16, "max_running": 4}])
    async with (
        serving(Role.WORKER, COMPOSE[Role.WORKER], file, redis.url, tier="only") as chassis,
        aio.insecure_channel(chassis.address) as channel,
    ):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        yield stub, (await stub.GetInfo(pb.GetInfoRequest())).model_digest, chassis


def ask(digest: str, name: str = "r", tokens: int = 100, sender_tokens: int = 100) -> pb.PlaceBidRequest:
    return pb.PlaceBidRequest(
        request_id=name,
        sequence_tokens=tokens,
        model_digest=digest,
        sender_buffered_tokens=sender_tokens,
        sender_instance_id="sender",
    )


async def confirmed(stub: Any, asked: pb.PlaceBidRequest) -> Any:
    call = stub.ConfirmBid()
    await call.write(pb.ConfirmBidRequest(confirmed=asked))
    return call


async def turn(call: Any) -> bool:
    """Wait for the turn; whether it is starving."""
    response = await asyncio.wait_for(call.read(), 60)
    assert response.WhichOneof("event") == "transfer_turn", response
    return bool(response.transfer_turn.starving)


BUSY = pb.ConfirmBidRequest(sender_busy=pb.SenderBusy())
STARTED = pb.ConfirmBidRequest(transfer_started=pb.TransferStarted())


async def test_a_bid_tells_load_room_and_how_soon(worker: tuple[Any, str, Chassis]) -> None:
    stub, digest, _ = worker
    answer = await stub.PlaceBid(ask(digest))
    assert (answer.bid.load_tokens, answer.bid.free_kv_blocks) == (0, 64)
    assert answer.bid.earliest_start.ToTimedelta().total_seconds() == 0.0
    call = await confirmed(stub, ask(digest, "won", tokens=900))
    await turn(call)
    later = await stub.PlaceBid(ask(digest, tokens=50))
    assert later.bid.earliest_start.ToTimedelta().total_seconds() > 0, "behind what is buffered"
    assert (await stub.PlaceBid(ask(digest, tokens=200))).refusal == "no_idle_kv", "its room is set aside"
    assert (await stub.PlaceBid(ask(digest, "won"))).refusal == "known_already"
    call.cancel()


async def test_who_cannot_take_a_request_says_why(worker: tuple[Any, str, Chassis]) -> None:
    stub, digest, chassis = worker
    assert (await stub.PlaceBid(ask("another model"))).refusal == "other_model"
    assert (await stub.PlaceBid(ask(digest, tokens=1024))).refusal == "no_idle_kv"
    refused = await confirmed(stub, ask(digest, tokens=1024))
    assert (await refused.read()).refusal == "no_idle_kv"
    assert await refused.read() is aio.EOF
    async with aio.insecure_channel(chassis.admin_address) as admin:
        await worker_pb2_grpc.WorkerServiceStub(admin).Drain(pb.DrainRequest(), timeout=60)
    assert (await stub.PlaceBid(ask(digest))).refusal == "draining"


async def test_an_unsound_ask_is_refused_by_the_fields_name(worker: tuple[Any, str, Chassis]) -> None:
    stub, digest, _ = worker
    for field in ("request_id", "model_digest", "sender_instance_id", "sequence_tokens"):
        asked = ask(digest)
        asked.ClearField(field)
        with pytest.raises(aio.AioRpcError, match=field) as caught:
            await stub.PlaceBid(asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = await confirmed(stub, asked)
        with pytest.raises(aio.AioRpcError, match=rf"confirmed\.{field}"):
            await call.read()


async def test_messages_out_of_order_end_the_call(worker: tuple[Any, str, Chassis]) -> None:
    stub, digest, _ = worker
    call = stub.ConfirmBid()
    await call.write(STARTED)
    with pytest.raises(aio.AioRpcError, match="confirmed is expected"):
        await call.read()
    call = await confirmed(stub, ask(digest))
    await turn(call)
    await call.write(STARTED)
    await call.write(STARTED)
    with pytest.raises(aio.AioRpcError, match="must be the last message"):
        await call.read()


async def test_as_many_transfers_at_once_as_the_mesh_file_says(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    most = MAX_TRANSFERS + 2
    file = mesh_file([{"name": "only", "model": "sim", "max_running": 16}], stages={"max_transfers": most})
    async with (
        serving(Role.WORKER, COMPOSE[Role.WORKER], file, redis.url, tier="only") as chassis,
        aio.insecure_channel(chassis.address) as channel,
    ):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        digest = (await stub.GetInfo(pb.GetInfoRequest())).model_digest
        calls = [await confirmed(stub, ask(digest, f"r{i}", 10)) for i in range(most)]
        for call in calls:
            assert not await turn(call)
            await call.write(STARTED)
        last = await confirmed(stub, ask(digest, "last", 10))
        reading = asyncio.create_task(turn(last))
        await stub.PlaceBid(ask(digest, "other", 10))  # the confirmation before has been taken in
        assert not reading.done()
        calls[0].cancel()
        assert not await reading
        for call in (last, *calls[1:]):
            call.cancel()


async def test_a_request_passed_over_too_often_is_starving(worker: tuple[Any, str, Chassis]) -> None:
    stub, digest, _ = worker
    call = await confirmed(stub, ask(digest))
    for _ in range(STARVED_AFTER):
        assert not await turn(call)
        await call.write(BUSY)
    assert await turn(call)
    call.cancel()
