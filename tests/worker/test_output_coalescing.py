"""Frames: the first token at once, later ones together, nothing lost."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from services.domain import FinishReason, TokenFrame, TokenUsage, Unavailable
from worker_service.engine.interface import Admitted, EngineEvent, Finished
from worker_service.output_coalescing import CoalescingLimits, coalesced

END = Finished(FinishReason.STOP, TokenUsage())


def token(at: int) -> TokenFrame:
    return TokenFrame(at, (at,), chr(97 + at))


async def source(count: int, gates: dict[int, asyncio.Event] | None = None) -> AsyncGenerator[EngineEvent, None]:
    yield Admitted(1, 10)
    for i in range(count):
        if gates and i in gates:
            await gates[i].wait()
        yield token(i)
    yield END


async def gathered(events: AsyncGenerator[EngineEvent, None], limits: CoalescingLimits) -> list[EngineEvent | None]:
    return [event async for event in coalesced(events, limits)]


async def test_the_first_token_goes_alone_and_the_rest_together() -> None:
    events = await gathered(source(6), CoalescingLimits(0.02, 100, 10))
    frames = [e for e in events if isinstance(e, TokenFrame)]
    assert frames[0].token_ids == (0,) or len(frames) == 1
    assert [t for f in frames for t in f.token_ids] == list(range(6))
    assert "".join(f.text for f in frames) == "abcdef"
    assert len(frames) <= 3
    assert isinstance(events[0], Admitted)
    assert events[-1] == END


async def test_a_frame_holds_no_more_than_its_limit() -> None:
    events = await gathered(source(10), CoalescingLimits(0.02, 3, 10))
    frames = [e for e in events if isinstance(e, TokenFrame)]
    assert max(len(f.token_ids) for f in frames) <= 3
    assert [f.offset for f in frames] == sorted({f.offset for f in frames})
    assert sum(len(f.token_ids) for f in frames) == 10


async def test_silence_is_filled_with_heartbeats() -> None:
    gate = asyncio.Event()
    seen: list[EngineEvent | None] = []
    async for event in coalesced(source(2, {1: gate}), CoalescingLimits(0.0, 3, 0.01)):
        seen.append(event)
        if seen.count(None) == 3:
            gate.set()
    assert seen.count(None) >= 3
    assert [e for e in seen if isinstance(e, TokenFrame)][-1].offset == 1


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    async def broken() -> AsyncGenerator[EngineEvent, None]:
        yield Admitted(1, 10)
        yield token(0)
        raise Unavailable("gone")

    frames = coalesced(broken(), CoalescingLimits(0.01, 10, 10))
    assert await anext(frames) == Admitted(1, 10)
    assert await anext(frames) == token(0)
    with pytest.raises(Unavailable):
        await anext(frames)


async def test_leaving_closes_the_source() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[EngineEvent, None]:
        try:
            for i in range(10**9):
                yield token(i)
                await asyncio.sleep(0)
        finally:
            closed.set()

    frames = coalesced(endless(), CoalescingLimits(0.0, 10, 10))
    await anext(frames)
    await frames.aclose()
    assert closed.is_set()
