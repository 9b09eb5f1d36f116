"""A reply that moves more than once: what happens to the stream that is read is not taken for news of the next move."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any, cast

from router_service.migration import MovableReply, WorkerChanged
from router_service.worker_client import (
    MoveReport,
    RoundCopied,
    WorkerAdmitted,
    WorkerAlive,
    WorkerClient,
    WorkerEvent,
    WorkerFinished,
    WorkerHandedOver,
)
from services.domain import (
    FinishReason,
    GenerationRequest,
    InstanceRecord,
    Role,
    SamplingParams,
    TextPrompt,
    TokenFrame,
    TokenUsage,
    Unavailable,
)


class Script:
    """Says what workers say, in the order of the test; only real ones that die at a given word could do the same."""

    def __init__(self) -> None:
        self.streams: defaultdict[str, asyncio.Queue[WorkerEvent | Unavailable]] = defaultdict(asyncio.Queue)
        self.reports: defaultdict[str, asyncio.Queue[MoveReport]] = defaultdict(asyncio.Queue)

    def say(self, worker: str, *events: WorkerEvent | Unavailable) -> None:
        for event in events:
            self.streams[worker].put_nowait(event)

    async def generate(self, address: str, _: GenerationRequest, **__: Any) -> AsyncGenerator[WorkerEvent, None]:
        while True:
            event = await self.streams[address].get()
            if isinstance(event, Unavailable):
                raise event
            yield event

    async def migrate_out(self, address: str, *_: Any, **__: Any) -> AsyncGenerator[MoveReport, None]:
        while True:
            yield await self.reports[address].get()


def record(name: str) -> InstanceRecord:
    return InstanceRecord(name, Role.WORKER, name, 1.0, 1, 9.0)


def token(offset: int) -> TokenFrame:
    return TokenFrame(offset, (7,), "x")


async def test_a_second_move_whose_source_dies_goes_on_at_its_target() -> None:
    script, loop = Script(), asyncio.get_running_loop()
    request = GenerationRequest("r", TextPrompt("hello"), SamplingParams(seed=1))
    reply = MovableReply(cast(WorkerClient, script), record("a"), request, loop.time() + 60, ())
    admitted = WorkerAdmitted(slo_kept=True, prompt_tokens=1, max_output_tokens=9)
    async with asyncio.timeout(10):
        events = reply.events()
        script.say("a", admitted, token(0))
        assert [await anext(events), await anext(events)] == [admitted, token(0)]

        first = asyncio.create_task(reply.move(record("b"), "asked"))
        script.say("b", WorkerAlive(), admitted, token(1))
        script.reports["a"].put_nowait(WorkerHandedOver(1))
        await first
        script.say("a", WorkerHandedOver(1))
        assert [await anext(events) for _ in range(3)] == [WorkerChanged(record("b"), "asked"), admitted, token(1)]

        started = asyncio.Event()
        second = asyncio.create_task(reply.move(record("c"), "asked", on_started=_set(started)))
        script.say("c", WorkerAlive())
        script.reports["b"].put_nowait(RoundCopied(1, 1))
        await started.wait()
        script.say("b", Unavailable("it died"))
        script.say("c", admitted, token(2), WorkerFinished(FinishReason.STOP, TokenUsage(1, 0, 3), None))
        rest = [event async for event in events]
        assert rest[:3] == [WorkerChanged(record("c"), "asked"), admitted, token(2)]
        second.cancel()
        await asyncio.wait([second])


def _set(event: asyncio.Event) -> Any:
    async def started() -> None:
        event.set()

    return started
