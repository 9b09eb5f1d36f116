"""The door: bounded, fair, and never leaking a place."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from router_service.gate import Gate
from services.domain import DeadlineExceeded, Overloaded

LATER = 1e12


async def test_the_queue_is_bounded_and_says_when_to_come_again() -> None:
    gate = Gate(max_active=1, max_waiting=1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(gate.entered(0, LATER))
        waiting = asyncio.create_task(stack.enter_async_context(gate.entered(0, LATER)))
        await asyncio.sleep(0)
        assert (gate.active, gate.waiting) == (1, 1)
        with pytest.raises(Overloaded) as caught:
            async with gate.entered(0, LATER):
                pass
        assert caught.value.retry_after_s > 0
        assert gate.rejected == 1
        waiting.cancel()
    assert (gate.active, gate.waiting) == (0, 0)


async def test_higher_priority_enters_first_then_the_first_come() -> None:
    gate = Gate(max_active=1, max_waiting=10)
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        async with gate.entered(priority, LATER):
            order.append(name)

    async with gate.entered(0, LATER):
        tasks = [asyncio.create_task(one(n, p)) for n, p in (("a", 0), ("b", 5), ("c", 0), ("d", 5))]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == ["b", "d", "a", "c"]


async def test_the_deadline_passes_in_the_queue() -> None:
    gate = Gate(max_active=1, max_waiting=10)
    async with gate.entered(0, LATER):
        with pytest.raises(DeadlineExceeded):
            async with gate.entered(0, asyncio.get_running_loop().time() + 0.01):
                pass
        assert gate.waiting == 0
    assert gate.active == 0


async def test_no_place_leaks_whoever_is_cancelled_and_whenever() -> None:
    gate = Gate(max_active=2, max_waiting=100)

    async def one(turns: int) -> None:
        async with gate.entered(0, LATER):
            for _ in range(turns):
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(one(i % 4)) for i in range(60)]
    for i, task in enumerate(tasks):
        await asyncio.sleep(0)
        if i % 3 == 0:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (gate.active, gate.waiting) == (0, 0)
