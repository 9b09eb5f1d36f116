"""Moves between two workers over gRPC, the test playing the router, and the bids for them: queue, turns, starvation."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest
from grpc import aio

from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.router_service.migration.movable_reply import MAX_MOVE_S
from penstock.services.domain.stages.bidding import MAX_TRANSFERS, STARVED_AFTER
from penstock.services.errors import from_rpc
from penstock.services.runtime import Chassis
from penstock.worker_service.engine.simulated.engine import SimulatedRunner
from penstock.worker_service.engine.torch.runner import TorchRunner
from penstock.worker_service.migration.receiver import AWAIT_S
from tests.conftest import FAMILY, MeshFileMaker
from tests.support.held_engine import held_engines
from tests.support.mesh import Stub, served_worker
from tests.support.services import RedisProcess

TOKENS = 400
RUNNERS = (SimulatedRunner, TorchRunner)
STEP_S = 0.02  # while a test arranges a move: the reply goes on, but does not end before that


@pytest.fixture(params=["torch", "simulated"])
async def pair(
    request: pytest.FixtureRequest, redis: RedisProcess, mesh_file: MeshFileMaker
) -> AsyncIterator[tuple[Stub, Stub, Chassis]]:
    """Source, target, and the target's chassis."""
    model = str(FAMILY / "small") if request.param == "torch" else "sim"
    file = mesh_file([{"name": "only", "model": model, "engine": request.param, "max_running": 4, "max_queued": 4}])
    async with (
        served_worker(file, redis.url, instance_id="one") as (source, _),
        served_worker(file, redis.url, instance_id="two") as (target, two),
    ):
        await registered(source, two)
        yield source, target, two


async def registered(source: Stub, target: Chassis) -> None:
    """Return once the source finds the target in the registry."""
    order = pb.MigrateOutRequest(request_id="none", transfer_id="none", target_instance_id=target.instance_id)
    async with asyncio.timeout(120):
        while True:
            try:
                async for _ in source.MigrateOut(order):  # there is no such request
                    pass
                return
            except aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                await asyncio.sleep(0.02)


def asked(name: str = "r", transfer: str = "", **sampling: Any) -> pb.GenerateRequest:
    params = common_pb2.SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, **sampling})
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
    async with asyncio.timeout(60):
        for stub in stubs:
            whole = (await stub.GetInfo(pb.GetInfoRequest())).kv_blocks
            while (await stub.GetLoad(pb.GetLoadRequest())).free_kv_blocks < whole:
                await asyncio.sleep(0.01)


async def test_a_reply_moves_and_goes_on_at_the_next_token(pair: tuple[Stub, Stub, Chassis]) -> None:
    source, target, place = pair
    whole, _ = await read(source.Generate(asked()))
    with held_engines(runners=RUNNERS, step_s=STEP_S):
        call = source.Generate(asked())
        first, _ = await read(call, "tokens")
        claim = target.Generate(asked(transfer="t"))
        await read(claim, "alive")
        order = pb.MigrateOutRequest(request_id="r", transfer_id="t", target_instance_id=place.instance_id)
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


async def refused(source: Stub, place: Chassis, transfer: str = "t", name: str = "r") -> str:
    """Why a move fails."""
    order = pb.MigrateOutRequest(request_id=name, transfer_id=transfer, target_instance_id=place.instance_id)
    *_, last = [report async for report in source.MigrateOut(order)]
    assert last.HasField("not_moved"), last
    return last.not_moved.reason


async def test_a_move_that_cannot_be_leaves_the_reply_where_it_was(pair: tuple[Stub, Stub, Chassis]) -> None:
    source, target, place = pair
    assert "decoding request" in await refused(source, place)
    with held_engines(runners=RUNNERS, step_s=STEP_S):
        call = source.Generate(asked())
        first, _ = await read(call, "tokens")
        assert "no router expects transfer" in await refused(source, place)
        claim = target.Generate(asked(transfer="gone"))
        await read(claim, "alive")
        claim.cancel()
        assert "expects transfer" in await refused(source, place, "gone")
    with pytest.raises(aio.AioRpcError) as caught:
        await read(source.MigrateOut(pb.MigrateOutRequest(request_id="r", transfer_id="t")))
    assert "target_instance_id" in str(from_rpc(caught.value))
    rest, end = await read(call)
    assert len(first + rest) == end.finished.usage.output_tokens == TOKENS
    await idle(source, target)


async def test_another_request_than_the_one_awaited_is_refused_at_the_end(pair: tuple[Stub, Stub, Chassis]) -> None:
    """The claim's prompt is not the one that comes: the source resumes what it had stopped."""
    source, target, place = pair
    whole, _ = await read(source.Generate(asked()))
    with held_engines(runners=RUNNERS, step_s=STEP_S):
        call = source.Generate(asked())
        first, _ = await read(call, "tokens")
        other = asked(transfer="t")
        other.prompt.text = "Another prompt."
        claim = target.Generate(other)
        await read(claim, "alive")
        assert "token_ids" in await refused(source, place)
    with pytest.raises(aio.AioRpcError):
        await read(claim)
    rest, _ = await read(call)
    assert first + rest == whole
    await idle(source, target)


async def test_a_reply_aborted_on_its_way_ends_on_both_sides(pair: tuple[Stub, Stub, Chassis]) -> None:
    source, target, place = pair
    call = source.Generate(asked(max_tokens=1500))
    await read(call, "tokens")
    claim = target.Generate(asked(transfer="t", max_tokens=1500))
    await read(claim, "alive")
    order = pb.MigrateOutRequest(request_id="r", transfer_id="t", target_instance_id=place.instance_id)
    moving = asyncio.create_task(read(source.MigrateOut(order)))
    await source.Abort(pb.AbortRequest(request_id="r"))
    call.cancel()
    claim.cancel()
    await moving
    await idle(source, target)


def test_a_target_waits_for_a_transfer_as_long_as_a_router_lets_it_wait() -> None:
    """A starving request waits at its source for the transfer ahead of it: if the target gave up before, starvation relief
    would fail exactly when it is needed."""
    assert AWAIT_S >= MAX_MOVE_S


async def test_other_layouts_and_models_are_refused(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """And no more requests are expected at once than `stages.max_transfers`."""
    mesh = f"layouts-{secrets.token_hex(4)}"

    def worker(instance_id: str, model: str, kv_block_tokens: int) -> AbstractAsyncContextManager[tuple[Stub, Chassis]]:
        """A worker of the tier, whose mesh file is not that of the others."""
        tier = {"name": "only", "model": model, "kv_block_tokens": kv_block_tokens}
        file = mesh_file([tier], name=mesh, stages={"max_transfers": 2})
        return served_worker(file, redis.url, instance_id=instance_id)

    async with (
        worker("one", "sim", 16) as (source, _),
        worker("two", "sim", 8) as (to_two, two),
        worker("three", "another", 16) as (to_three, three),
    ):
        call = source.Generate(asked(max_tokens=1500))
        await read(call, "tokens")
        for target, place, said in ((to_two, two, "block_tokens=8"), (to_three, three, "simulated-another")):
            await registered(source, place)
            claim = target.Generate(asked(transfer="t"))
            await read(claim, "alive")
            assert said in await refused(source, place)
            with pytest.raises(aio.AioRpcError) as caught:
                await read(claim)
            assert said in str(from_rpc(caught.value))
            await idle(target)
        claims = [target.Generate(asked(f"w{i}", transfer=f"w{i}")) for i in range(2)]
        for claim in claims:
            await read(claim, "alive")
        with pytest.raises(aio.AioRpcError) as caught:
            await read(target.Generate(asked("w2", transfer="w2")))
        assert "2 transfers are already active" in str(from_rpc(caught.value))
        for claim in claims:
            claim.cancel()
        call.cancel()


@pytest.fixture
async def worker(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[tuple[Any, str, Chassis]]:
    """A worker's stub, its model's digest, and the worker."""
    file = mesh_file([{"name": "only", "model": "sim", "kv_tokens": 1024, "kv_block_tokens": 16, "max_running": 4}])
    async with served_worker(file, redis.url) as (stub, chassis):
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
    """And at the rate that it states."""
    most = MAX_TRANSFERS + 2
    stages = {"max_transfers": most, "kv_bandwidth_gb_per_s": 2.5}
    file = mesh_file([{"name": "only", "model": "sim", "max_running": 16}], stages=stages)
    async with served_worker(file, redis.url) as (stub, _):
        assert (await stub.GetLoad(pb.GetLoadRequest())).kv_bytes_per_second == 2.5e9
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
