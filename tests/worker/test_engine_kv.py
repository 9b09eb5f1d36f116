"""One suite for every engine: how KV leaves one and enters another."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from penstock.services.domain.errors import (
    AlreadyRunning,
    InvalidRequest,
    NotFound,
    Overloaded,
)
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.workers import EngineFinished, HandedOver
from penstock.worker_service.engine.interface import Capability, LastBlocks
from tests.support.engines import (
    ENGINES,
    GREEDY,
    QUESTIONS,
    SAMPLED,
    Make,
    answer,
    collect,
    engines_of,
    move,
    needs,
    nothing_held,
    request,
    waits_at,
)
from tests.support.token_events import iterated


@pytest.fixture(params=ENGINES)
async def make(request: pytest.FixtureRequest, gguf_family: Callable[[str], Path]) -> AsyncIterator[Make]:
    async with engines_of(request, gguf_family) as build:
        yield build


async def test_kv_moves_to_another_engine_while_the_reply_is_made(make: Make) -> None:
    source, target = await make(), await make()
    needs(source, Capability.KV_TRANSFER)
    for i, kind in enumerate((GREEDY, SAMPLED)):
        asked = request("r", QUESTIONS[3], replace(kind, max_tokens=200))
        whole = await answer(source, asked)
        release = waits_at(source, len(whole.tokens) - 3)
        said, nine, left = list[int](), asyncio.Event(), list[int]()

        async def read(asked: GenerationRequest, said: list[int], nine: asyncio.Event, left: list[int]) -> None:
            async for event in source.generate(asked):
                if isinstance(event, TokenFrame):
                    said += event.token_ids
                    if len(said) >= 9:
                        nine.set()
                elif isinstance(event, HandedOver):
                    left.append(event.offset)

        reading = asyncio.create_task(read(asked, said, nine, left))
        await nine.wait()
        stopped, present, last = await move(source, target, "r", "t")
        steps, before = source.steps, target.steps
        offset = len(said)  # what was computed was handed out when it was stopped
        enter = partial(target.enter, "t", asked, stopped.tokens, last)
        rest = await collect(enter() if kind is GREEDY else iterated(enter), offset)
        assert source.steps == steps
        assert (await source.leave("r")).offset == offset
        release()
        await reading
        assert left == [offset]
        assert tuple(said) + rest.tokens == whole.tokens
        assert target.steps - before == len(rest.tokens)  # not a token of the prefix was computed again
        assert (present > 0) == (i > 0)  # the second time the prompt's blocks were there already
    await nothing_held(source)
    await nothing_held(target)


async def test_a_stopped_request_that_does_not_leave_goes_on_unchanged(make: Make) -> None:
    source, target = await make(), await make()
    needs(source, Capability.KV_TRANSFER)
    asked = request("r", QUESTIONS[3], replace(GREEDY, max_tokens=200))
    whole = await answer(source, asked)
    let_go = waits_at(source, len(whole.tokens) - 3)
    said, moved = list[int](), False
    async for event in source.generate(asked):
        if isinstance(event, TokenFrame):
            said += event.token_ids
            if len(said) >= 5 and not moved:
                moved = True
                await move(source, target, "r", "t")
                await target.release("t")
                await source.resume("r")
                let_go()
    assert tuple(said) == whole.tokens
    await nothing_held(target)


async def test_a_stopped_request_can_be_aborted(make: Make) -> None:
    engine = await make()
    needs(engine, Capability.KV_TRANSFER)
    endless = replace(GREEDY, max_tokens=1500)
    waits_at(engine, 100)
    async for event in engine.generate(request("r", sampling=endless)):
        if isinstance(event, TokenFrame) and event.offset == 20:
            await engine.pause("r", 0)
            assert await engine.abort("r")
        last = event
    assert isinstance(last, EngineFinished)
    assert last.reason is FinishReason.ABORTED
    with pytest.raises(NotFound):
        await engine.leave("r")
    await engine.resume("r")
    await nothing_held(engine)


async def test_kv_that_does_not_fit_is_refused(make: Make) -> None:
    engine = await make()
    needs(engine, Capability.KV_TRANSFER)
    other = await make(kv_block_tokens=8)
    endless = replace(GREEDY, max_tokens=1500)
    asked = request("a", sampling=endless)
    waits_at(engine, 100)
    async with aclosing(engine.generate(asked)) as events:
        async for event in events:
            if isinstance(event, TokenFrame) and event.offset > 20:
                break
        tokens = await engine.computed_tokens("a")
        with pytest.raises(InvalidRequest, match="layout"):
            await other.reserve("t", engine.kv_layout, tokens)
        with pytest.raises(InvalidRequest, match="layout"):
            await engine.reserve("t", replace(engine.kv_layout, model_digest="another"), tokens)
        with pytest.raises(InvalidRequest, match="full ones"):
            await engine.read_kv("a", 0, 1000)
        with pytest.raises(InvalidRequest, match="first_block"):
            await engine.pause("a", 1000)
        for wrong in (engine.computed_tokens("b"), engine.read_kv("b", 0, 1), engine.pause("b", 0), engine.leave("b")):
            with pytest.raises(NotFound):
                await wrong
        present = await engine.reserve("t", engine.kv_layout, tokens)
        assert present == len(tokens) // 16  # its own blocks
        with pytest.raises(AlreadyRunning):
            await engine.reserve("t", engine.kv_layout, tokens)
        data = await engine.read_kv("a", 0, 1)
        with pytest.raises(InvalidRequest, match="present already"):
            await engine.write_kv("t", 0, data)
        with pytest.raises(Overloaded, match="blocks"):
            await engine.write_kv("t", engine.info.kv_blocks, data)
        for first, problem in ((0, InvalidRequest), (engine.info.kv_blocks, Overloaded)):
            with pytest.raises(problem):
                await collect(engine.enter("t", request("c", sampling=endless), tokens, LastBlocks(first, data)))
            with pytest.raises(NotFound):
                await engine.write_kv("t", 0, data)
            await engine.reserve("t", engine.kv_layout, tokens)
        with pytest.raises(InvalidRequest, match="token_ids"):  # not as many blocks as tokens
            await collect(engine.enter("t", request("c", sampling=endless), (*tokens, *range(1, 200))))
        with pytest.raises(NotFound):  # the reservation is gone
            await collect(engine.enter("t", request("c", sampling=endless), tokens))
        await engine.reserve("t", engine.kv_layout, tokens)
        with pytest.raises(InvalidRequest, match="prompt"):
            await collect(engine.enter("t", request("c", "another", endless), tokens))
        await engine.release("t")
    await nothing_held(engine)


async def test_reserved_room_is_only_what_is_idle(make: Make) -> None:
    needs(await make(), Capability.KV_TRANSFER)
    engine = await make(kv_tokens=96, kv_block_tokens=16, max_context_tokens=96)
    await engine.reserve("t", engine.kv_layout, range(1, 70))  # 5 of 6 blocks
    with pytest.raises(Overloaded, match="blocks"):
        await engine.reserve("u", engine.kv_layout, range(100, 130))
    await engine.release("t")
    await engine.release("t")
    assert await engine.reserve("u", engine.kv_layout, range(100, 130)) == 0
    await engine.release("u")


def test_block_bytes_are_the_size_of_exported_blocks() -> None:
    from penstock.types.workers import KvLayout

    layout = KvLayout("d", 2, 2, 16, 4, "float32")
    assert layout.block_bytes == np.zeros((1, 2, 2, 4, 2, 16), np.float32).nbytes
