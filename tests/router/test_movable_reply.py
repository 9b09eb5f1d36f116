"""A reply that moves: what the stream that is read says is not taken for news of the next move; failures are told."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from penstock.router_service.clients.worker_client import OnWorkerEvent, WorkerClient
from penstock.router_service.migration import movable_reply
from penstock.router_service.migration.movable_reply import MovableReply, WorkerChanged
from penstock.router_service.migration.moves import Reading
from penstock.services.background import end
from penstock.services.domain.errors import Unavailable
from penstock.services.domain.instances import InstanceRecord, Role
from penstock.services.event_streams import OnTokens
from penstock.types.prompts import TextPrompt
from penstock.types.replies import FinishReason, TokenFrame, Usage
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import (
    Admitted,
    Alive,
    EngineFinished,
    HandedOver,
    MoveReport,
    NotMoved,
    RoundCopied,
    WorkerEnd,
    WorkerEvent,
)
from tests.support.token_events import called
from tests.support.waiting import until

REQUEST = GenerationRequest("r", TextPrompt("hello"), SamplingParams(seed=1))
ADMITTED = Admitted(slo_kept=True, prompt_tokens=1, max_output_tokens=9)
Said = WorkerEvent | TokenFrame | WorkerEnd | Unavailable


class Script:
    """Says what workers say, in the order of the test; only real ones that die at a given word could do the same."""

    def __init__(self) -> None:
        self.streams: defaultdict[str, asyncio.Queue[Said]] = defaultdict(asyncio.Queue)
        self.reports: defaultdict[str, asyncio.Queue[MoveReport]] = defaultdict(asyncio.Queue)

    def say(self, worker: str, *events: Said) -> None:
        for event in events:
            self.streams[worker].put_nowait(event)

    async def generate(
        self, address: str, _: GenerationRequest, *, on_event: OnWorkerEvent, on_tokens: OnTokens, **__: Any
    ) -> WorkerEnd:
        while True:
            match event := await self.streams[address].get():
                case Unavailable():
                    raise event
                case TokenFrame():
                    on_tokens(event)
                case EngineFinished() | HandedOver():
                    return event
                case _:
                    on_event(event)

    async def migrate_out(self, address: str, *_: Any, **__: Any) -> AsyncGenerator[MoveReport, None]:
        while True:
            yield await self.reports[address].get()


def record(name: str) -> InstanceRecord:
    return InstanceRecord(name, Role.WORKER, name, 1.0, 1, 9.0)


def token(offset: int) -> TokenFrame:
    return TokenFrame(offset, (7,), "x")


def read(
    script: Script, request: GenerationRequest, deadline_s: float, **options: Any
) -> tuple[MovableReply, AsyncGenerator[Any, None]]:
    """A reply at a, and all that it passes on, its end included."""
    calls: list[Callable[[Any], None]] = []
    reply = MovableReply(
        cast(WorkerClient, script),
        record("a"),
        request,
        deadline_s,
        (),
        on_event=lambda event: calls[0](event),
        on_tokens=lambda frame: calls[0](frame),
        **options,
    )

    async def run(call: Callable[[Any], None]) -> EngineFinished:
        calls.append(call)
        return await reply.run()

    return reply, called(run)


async def test_a_second_move_whose_source_dies_goes_on_at_its_target() -> None:
    script, loop = Script(), asyncio.get_running_loop()
    reply, events = read(script, REQUEST, loop.time() + 60)
    async with asyncio.timeout(60):
        script.say("a", ADMITTED, token(0))
        assert [await anext(events), await anext(events)] == [ADMITTED, token(0)]

        first = asyncio.create_task(reply.move(record("b"), "asked"))
        script.say("b", Alive(), ADMITTED, token(1))
        script.reports["a"].put_nowait(HandedOver(1))
        await first
        script.say("a", HandedOver(1))
        assert [await anext(events) for _ in range(3)] == [WorkerChanged(record("b"), "asked"), ADMITTED, token(1)]

        started = asyncio.Event()
        second = asyncio.create_task(reply.move(record("c"), "asked", on_started=_set(started)))
        script.say("c", Alive())
        script.reports["b"].put_nowait(RoundCopied(1, 1, 1))
        await started.wait()
        script.say("b", Unavailable("it died"))
        script.say("c", ADMITTED, token(2), EngineFinished(FinishReason.STOP, Usage(1, 0, 3), None))
        rest = [event async for event in events]
        assert rest[:3] == [WorkerChanged(record("c"), "asked"), ADMITTED, token(2)]
        second.cancel()
        await asyncio.wait([second])


@dataclass
class Moving:
    """A reply at a whose move to b is under way. failed: whom it said to have failed while it went on elsewhere."""

    script: Script
    reply: MovableReply
    events: AsyncGenerator[Any, None]
    task: "asyncio.Task[Any]"
    failed: list[str]


@pytest.fixture
async def moving() -> AsyncIterator[Moving]:
    script, failed, started = Script(), list[str](), asyncio.Event()
    reply, events = read(script, REQUEST, 1e12, on_failure=lambda record, _: failed.append(record.instance_id))
    script.say("a", token(0))
    await anext(events)
    task = asyncio.create_task(reply.move(record("b"), "asked", on_started=_set(started)))
    script.say("b", Alive())
    script.reports["a"].put_nowait(RoundCopied(1, 1, 1))
    await started.wait()
    yield Moving(script, reply, events, task, failed)
    await end(task)
    await events.aclose()


async def test_a_source_that_dies_is_told_though_the_reply_goes_on_at_its_target(moving: Moving) -> None:
    moving.script.say("a", Unavailable("it died"))
    moving.script.say("b", ADMITTED, token(1))
    assert await anext(moving.events) == WorkerChanged(record("b"), "asked")
    assert moving.failed == ["a"]


async def test_a_reply_that_its_source_ends_does_not_wait_for_a_move_that_the_source_then_refuses(
    moving: Moving,
) -> None:
    """As in a drain that is cut short: the reply ends first, and the move's report comes after it."""
    rest = asyncio.ensure_future(anext(moving.events))
    moving.script.say("a", EngineFinished(FinishReason.ABORTED, Usage(1, 0, 1), None))
    await until(lambda: moving.reply._reading is Reading.ORPHANED)
    moving.script.reports["a"].put_nowait(NotMoved("it has ended"))
    assert await moving.task == NotMoved("it has ended")
    with pytest.raises(Unavailable, match="ended the reply"):
        await rest
    assert moving.failed == []


async def test_a_reply_without_a_source_waits_for_its_target_only_so_long(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(movable_reply, "ORPHANED_S", 0.01)
    moving.script.say("a", Unavailable("it died"))
    with pytest.raises(Unavailable, match="it died"):
        await anext(moving.events)


async def test_a_target_that_dies_is_told_though_the_reply_goes_on_at_its_source(moving: Moving) -> None:
    moving.script.say("b", Unavailable("it died"))
    await until(lambda: moving.failed)
    moving.script.say("a", token(1))
    assert await anext(moving.events) == token(1)
    assert moving.failed == ["b"]


async def test_a_target_that_is_read_already_is_told_once_by_its_own_error(moving: Moving) -> None:
    moving.script.say("a", HandedOver(1))
    moving.script.say("b", ADMITTED)
    assert await anext(moving.events) == WorkerChanged(record("b"), "asked")
    await anext(moving.events)
    moving.script.say("b", Unavailable("it died"))
    with pytest.raises(Unavailable, match="it died"):
        await anext(moving.events)
    assert moving.failed == []


async def test_a_reply_that_may_not_move_stays_and_nobody_is_asked() -> None:
    script = Script()
    reply, _ = read(script, REQUEST, 1e12, may_move=lambda: False)
    assert isinstance(await reply.move(record("b"), "asked"), NotMoved)
    assert "b" not in script.streams


def _set(event: asyncio.Event) -> Any:
    async def started() -> None:
        event.set()

    return started
