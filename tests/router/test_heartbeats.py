"""Heartbeats on a stream that has nothing to send; none, and no cost, on one that has."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from grpc import aio

from penstock import Options
from penstock.client import messages
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.router_service.domain.events import Answer, RequestOutput, RouterEvent
from penstock.router_service.heartbeats import MAX_JOINED_TOKENS, MAX_UNREAD_EVENTS, with_heartbeats
from penstock.types.events import Heartbeat, TierStarted
from penstock.types.replies import TokenFrame
from tests.conftest import MeshRunner
from tests.support.mesh import TestMesh


def event(number: int) -> RouterEvent:
    return TierStarted("t", str(number))


async def numbered(output: RequestOutput, count: int) -> None:
    for number in range(count):
        await asyncio.sleep(0)
        output.event(event(number))


async def test_events_pass_in_order_and_cost_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), itertools.count()
    call_at = loop.call_at

    def counted(*arguments: Any, **options: Any) -> asyncio.TimerHandle:
        next(timers)
        return call_at(*arguments, **options)

    monkeypatch.setattr(loop, "call_at", counted)
    async with aclosing(with_heartbeats(lambda output: numbered(output, 1000), 60.0)) as events:
        assert [e async for e in events] == [event(number) for number in range(1000)]
    assert next(timers) <= 2  # one for the stream; `asyncio.wait` may set one at its end


async def test_a_stream_without_events_gets_a_heartbeat_at_each_interval_and_loses_no_event() -> None:
    go_on = asyncio.Event()

    async def source(output: RequestOutput) -> None:
        output.event(event(0))
        await go_on.wait()
        output.event(event(1))

    seen: list[RouterEvent | Heartbeat] = []
    loop = asyncio.get_running_loop()
    async with aclosing(with_heartbeats(source, 0.02)) as events:
        began = loop.time()
        async for e in events:
            seen.append(e)
            if len(seen) == 5:
                assert loop.time() - began >= 4 * 0.02
                go_on.set()
    assert seen[0] == event(0)
    assert seen[1:5] == [Heartbeat(0.02)] * 4
    assert [e for e in seen[5:] if e != Heartbeat(0.02)] == [event(1)]


async def test_an_error_comes_after_the_events_before_it() -> None:
    async def source(output: RequestOutput) -> None:
        output.event(event(0))
        output.event(event(1))
        raise LookupError("gone")

    async with aclosing(with_heartbeats(source, 60.0)) as events:
        assert [await anext(events), await anext(events)] == [event(0), event(1)]
        with pytest.raises(LookupError, match="gone"):
            await anext(events)


async def test_a_request_ends_when_its_reader_leaves_and_is_sent_when_its_reader_has_read() -> None:
    """So a request keeps its place as long as its client has not read it."""
    sent, closed = asyncio.Event(), asyncio.Event()

    async def source(output: RequestOutput) -> None:
        try:
            for number in range(3 * MAX_UNREAD_EVENTS):
                output.event(event(number))
            await output.sent()
            sent.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    async with aclosing(with_heartbeats(source, 60.0)) as events:
        await anext(events)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not sent.is_set()
        while not sent.is_set():
            await anext(events)
            await asyncio.sleep(0)
    assert closed.is_set()


async def test_an_answer_keeps_its_place_among_the_events_and_is_joined_while_the_reader_is_slow() -> None:
    """Parts of two tiers are not joined, nor is more than an event may hold."""
    ready = asyncio.Event()

    async def source(output: RequestOutput) -> None:
        output.event(event(0))
        output.answer("a", part(0))
        ready.set()
        for at in range(1, 2 * MAX_JOINED_TOKENS):
            output.answer("a", part(at))
        output.answer("b", part(0))
        output.event(event(1))

    async with aclosing(with_heartbeats(source, 60.0)) as events:
        assert await anext(events) == event(0)
        await ready.wait()
        rest = [e async for e in events]
    assert rest[-1] == event(1)
    answers = [e for e in rest[:-1] if isinstance(e, Answer)]
    assert len(answers) == len(rest) - 1 == 3
    assert [(a.tier, a.frame.offset, len(a.frame.token_ids)) for a in answers] == [
        ("a", 0, MAX_JOINED_TOKENS),
        ("a", MAX_JOINED_TOKENS, MAX_JOINED_TOKENS),
        ("b", 0, 1),
    ]
    assert "".join(a.frame.text for a in answers) == "x" * (2 * MAX_JOINED_TOKENS + 1)


def part(at: int) -> TokenFrame:
    return TokenFrame(at, (at,), "x")


@pytest.fixture
async def slow_mesh(run_mesh: MeshRunner) -> AsyncIterator[TestMesh]:
    """One request at a time; the first tier takes several hundred ms; heartbeats every 50 ms."""
    slow = {"overhead_ms": 60.0, "reply_tokens": 24}
    tiers = [{"name": "small", "model": "s", "threshold": 50, "simulated": slow}, {"name": "large", "model": "l"}]
    async with run_mesh(tiers, router={"heartbeat_s": 0.05, "max_active": 1}) as running:
        yield running


async def test_a_router_says_that_it_is_alive_while_it_has_nothing_to_send(slow_mesh: TestMesh) -> None:
    """In the admission queue, which comes before `accepted`, and while an answer is held for the judge."""
    async with aio.insecure_channel(slow_mesh.router.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)

        async def ask() -> list[pb.GenerateResponse]:
            request = messages.request_to_proto("hello", Options(temperature=0))
            return [response async for response in stub.Generate(request, timeout=60)]

        replies = await asyncio.gather(ask(), ask())
    in_queue = []
    for responses in replies:
        kinds = [response.WhichOneof("event") for response in responses]
        first = kinds.index("accepted")
        in_queue.append(first)
        assert set(kinds[:first]) <= {"heartbeat"}
        assert kinds.count("heartbeat") - first >= 3
        announced = {messages.heartbeat_interval_s(response) for response in responses} - {None}
        assert announced == {0.05}
    assert min(in_queue) == 0
    assert max(in_queue) >= 3
