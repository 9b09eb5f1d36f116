"""Outputs are handed over in slices: what arrives meanwhile does not wait for all of them, and nothing changes its order."""

import asyncio

import pytest

from services.domain.errors import Unavailable
from services.domain.requests import TokenFrame
from services.event_streams import EventStream
from worker_service.engine.core import StepOutput
from worker_service.engine.deliveries import SLICE, Deliveries
from worker_service.engine.interface import Admitted

REPLIES = 200


def frame(offset: int) -> TokenFrame:
    return TokenFrame(offset, (7,), "")


def tokens(offset: int) -> list[tuple[str, StepOutput]]:
    return [(f"r{i}", frame(offset)) for i in range(REPLIES)]


async def test_an_answer_waits_for_a_slice_of_the_readers_and_not_for_all() -> None:
    """Two hundred readers are woken by a step; an answer that comes right behind it is read before most of them."""
    read = list[str]()
    streams = {f"r{i}": EventStream[StepOutput]() for i in range(REPLIES)}
    streams["new"] = EventStream[StepOutput]()
    deliveries = Deliveries(streams)

    async def reader(name: str) -> None:
        await streams[name].get()
        read.append(name)

    tasks = [asyncio.create_task(reader(name)) for name in streams]
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    loop.call_soon_threadsafe(deliveries.deliver, tokens(0))
    loop.call_soon_threadsafe(deliveries.deliver, [("new", Admitted(1, 1))])
    await asyncio.gather(*tasks)
    assert len(read) == REPLIES + 1
    assert read.index("new") <= 2 * SLICE


async def test_the_outputs_of_a_request_stay_in_their_order() -> None:
    """Three steps at once, an answer of a request that has tokens waiting, and all of one request handed over early."""
    streams = {f"r{i}": EventStream[StepOutput]() for i in range(REPLIES)}
    deliveries, last = Deliveries(streams), f"r{REPLIES - 1}"
    for step in range(3):
        deliveries.deliver(tokens(step))
    deliveries.deliver([(last, Admitted(1, 1))])
    deliveries.deliver_of("r190")
    assert [await offset_of(streams["r190"]) for _ in range(3)] == [0, 1, 2]
    for i in {*range(REPLIES)} - {190}:
        assert [await offset_of(streams[f"r{i}"]) for _ in range(3)] == [0, 1, 2]
    assert isinstance(await streams[last].get(), Admitted)


async def offset_of(stream: EventStream[StepOutput]) -> int:
    output = await stream.get()
    assert isinstance(output, TokenFrame)
    return output.offset


async def test_everything_is_handed_over_at_once_when_the_engine_ends() -> None:
    """Also to readers that have not been waiting."""
    streams = {f"r{i}": EventStream[StepOutput]() for i in range(REPLIES)}
    deliveries = Deliveries(streams)
    deliveries.deliver(tokens(0))
    deliveries.deliver_all()
    for stream in streams.values():
        stream.fail(Unavailable("ended"))
        assert await offset_of(stream) == 0
        with pytest.raises(Unavailable):
            await stream.get()
