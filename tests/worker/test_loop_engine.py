"""What only the engines around our own core have: a thread that can fail, and seeds that change what is drawn."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from penstock.services.domain.errors import Unavailable
from penstock.types.replies import TokenFrame
from penstock.types.workers import HandedOver
from penstock.worker_service.engine.loop import LoopEngine
from tests.support.engines import GREEDY, SAMPLED, answer, request, started
from tests.worker.test_failing_requests import of_nothing, of_torch


@pytest.mark.parametrize("build", [of_torch, of_nothing])
async def test_a_broken_runner_fails_every_stream_and_says_so(build: Callable[[], LoopEngine]) -> None:
    async with started(build()) as engine:

        def broken(_: object) -> list[Any]:
            raise RuntimeError("no more memory")

        engine._core.runner.run = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(Unavailable):
            await answer(engine, request("a"))
        assert "no more memory" in str(await engine.failed())


async def test_another_seed_gives_another_reply() -> None:
    hot = replace(SAMPLED, temperature=2.0, top_p=1.0)
    async with started(of_torch()) as engine:
        replies = {(await answer(engine, request(f"r{s}", sampling=replace(hot, seed=s)))).tokens for s in range(4)}
    assert len(replies) > 1


async def test_the_reader_of_a_reply_that_has_left_does_not_wait_for_the_step_under_way() -> None:
    engine = of_nothing()
    await engine.start()
    run, go_on, holding = engine._core.runner.run, threading.Event(), threading.Event()
    go_on.set()

    def held(rows: Any) -> list[Any]:
        if not go_on.is_set():
            holding.set()
            go_on.wait()
        return run(rows)

    engine._core.runner.run = held  # type: ignore[method-assign]
    endless = replace(GREEDY, max_tokens=4000, ignore_eos=True)
    other = asyncio.create_task(answer(engine, request("stays", sampling=endless)))
    try:
        async with aclosing(engine.generate(request("leaves", sampling=endless))) as events:
            async for event in events:
                if isinstance(event, TokenFrame) and event.offset >= 5:
                    break
            stopped = await engine.pause("leaves", 0)
            go_on.clear()
            await asyncio.to_thread(holding.wait)
            async with asyncio.timeout(60):
                assert await engine.leave("leaves") == HandedOver(stopped.output_tokens)
                rest = [event async for event in events]
            assert rest[-1] == HandedOver(stopped.output_tokens)
            go_on.set()
    finally:
        go_on.set()
        other.cancel()
        await asyncio.wait([other])
        await engine.close()
