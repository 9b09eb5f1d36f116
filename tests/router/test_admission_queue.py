"""The admission queue: bounded, fair, and never leaking a place."""

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from router_service.admission.admission_queue import MAX_RETRY_S, RETRY_JITTER, AdmissionQueue
from router_service.domain.events import RouterRequest
from router_service.generation.request_driver import RequestDriver
from router_service.openai_gateway.replies import Choice
from router_service.telemetry.late_traces import LateTraces
from router_service.telemetry.stats import RouterStats
from services import telemetry
from services.domain import DeadlineExceeded, Overloaded
from services.domain.errors import InvalidRequest, Unavailable
from services.domain.mesh_view import MeshView
from services.domain.requests import SamplingParams, TextPrompt

LATER = 1e12


async def test_the_queue_is_bounded_and_says_when_to_come_again() -> None:
    queue = AdmissionQueue(max_active=1, max_waiting=1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(queue.entered(0, LATER))
        waiting = asyncio.create_task(stack.enter_async_context(queue.entered(0, LATER)))
        await asyncio.sleep(0)
        assert (queue.active, queue.waiting) == (1, 1)
        with pytest.raises(Overloaded) as caught:
            async with queue.entered(0, LATER):
                pass
        assert caught.value.retry_after_s > 0
        waiting.cancel()
    assert (queue.active, queue.waiting) == (0, 0)


async def test_higher_priority_enters_first_then_the_first_come() -> None:
    queue = AdmissionQueue(max_active=1, max_waiting=10)
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        async with queue.entered(priority, LATER):
            order.append(name)

    async with queue.entered(0, LATER):
        tasks = [asyncio.create_task(one(n, p)) for n, p in (("a", 0), ("b", 5), ("c", 0), ("d", 5))]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == ["b", "d", "a", "c"]


async def test_the_deadline_passes_in_the_queue() -> None:
    queue = AdmissionQueue(max_active=1, max_waiting=10)
    async with queue.entered(0, LATER):
        with pytest.raises(DeadlineExceeded):
            async with queue.entered(0, asyncio.get_running_loop().time() + 0.01):
                pass
        assert queue.waiting == 0
    assert queue.active == 0


async def test_no_place_leaks_whoever_is_cancelled_and_whenever() -> None:
    queue = AdmissionQueue(max_active=2, max_waiting=100)

    async def one(turns: int) -> None:
        async with queue.entered(0, LATER):
            for _ in range(turns):
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(one(i % 4)) for i in range(60)]
    for i, task in enumerate(tasks):
        await asyncio.sleep(0)
        if i % 3 == 0:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (queue.active, queue.waiting) == (0, 0)


async def test_requests_that_belong_together_enter_together_and_two_of_them_do_not_block_each_other() -> None:
    """Each needs more than half of the places: one runs, then the other; neither holds a part."""
    queue = AdmissionQueue(max_active=5, max_waiting=20)
    most = 0

    async def three() -> None:
        nonlocal most
        async with queue.entered(0, LATER, places=3) as places:
            most = max(most, queue.active)
            await asyncio.sleep(0)
            places.leave_one()
            await asyncio.sleep(0)

    async with asyncio.timeout(60):
        await asyncio.gather(*(three() for _ in range(6)))
    assert most == 5  # what one gives back early, and what is free, is used
    assert (queue.active, queue.waiting) == (0, 0)


async def test_more_together_than_can_ever_run_is_an_error_of_the_request() -> None:
    queue = AdmissionQueue(max_active=5, max_waiting=500)
    with pytest.raises(InvalidRequest) as caught:
        async with queue.entered(0, LATER, places=6):
            pass
    assert [problem.field for problem in caught.value.problems] == ["n"]
    assert (queue.active, queue.waiting) == (0, 0)


async def test_a_departed_first_waiter_lets_the_next_one_in() -> None:
    """One that waits for three places holds up those behind it; when it goes, they need not wait for a place to be left."""
    queue = AdmissionQueue(max_active=3, max_waiting=10)

    async def enter(places: int) -> None:
        async with queue.entered(0, LATER, places):
            pass

    async with queue.entered(0, LATER):
        many, one = asyncio.create_task(enter(3)), asyncio.create_task(enter(1))
        await asyncio.sleep(0)
        assert queue.waiting == 4
        many.cancel()
        await one
        assert (queue.active, queue.waiting) == (1, 0)


async def test_a_thousand_waiters_cancelled_in_one_turn_leave_nothing_behind() -> None:
    """Also where the place comes free before any of them has run: the one behind them gets it."""
    queue = AdmissionQueue(max_active=1, max_waiting=5000)

    async def enter() -> None:
        async with queue.entered(0, LATER):
            pass

    async with queue.entered(0, LATER):
        tasks = [asyncio.create_task(enter()) for _ in range(3000)]
        last = asyncio.create_task(enter())
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
    assert (queue.active, queue.waiting) == (1, 0), "the last one has been admitted already"
    await last
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (queue.active, queue.waiting) == (0, 0)


async def test_hints_are_spread_by_jitter_and_bounded() -> None:
    queue = AdmissionQueue(max_active=1, max_waiting=10_000, jitter=random.Random(5))
    again = AdmissionQueue(max_active=1, max_waiting=10_000, jitter=random.Random(5))
    async with queue.entered(0, LATER):
        now_s = asyncio.get_running_loop().time()
        hints = [queue.retry_after_s(now_s + 1e6) for _ in range(20)]
    assert all(MAX_RETRY_S <= hint <= MAX_RETRY_S * (1 + RETRY_JITTER) for hint in hints)
    assert len(set(hints)) == len(hints)
    async with again.entered(0, LATER):
        assert hints[0] == again.retry_after_s(asyncio.get_running_loop().time() + 1e6)


async def test_each_of_several_requests_gives_its_own_place_back_and_errors_are_counted_as_what_they_are() -> None:
    """One that ends before the others makes room; a refusal is a rejection, no failure."""
    queue, measured, unused = AdmissionQueue(max_active=2, max_waiting=0), telemetry.disabled(), cast("Any", None)
    view = MeshView()  # no plan: a request fails at once
    stats = RouterStats(measured.meter, view)
    late_traces = LateTraces(measured.tracer, measured.keeps_trace, slow_s=60.0)
    driver = RequestDriver(view, queue, unused, unused, stats, measured.tracer, late_traces)
    requests = [RouterRequest(f"r{i}", "m", TextPrompt("p"), SamplingParams(), deadline_s=LATER) for i in range(3)]
    async with driver.admitted(requests[:2]) as places:
        with pytest.raises(Overloaded):
            await driver.drive(requests[2], Choice(2))
        assert (queue.active, stats.rejected, stats.failed) == (2, 1, 0)
        with pytest.raises(Unavailable):
            await driver.run(requests[0], places, Choice(0))
        assert (queue.active, stats.rejected, stats.failed) == (1, 1, 1)
    assert (queue.active, queue.waiting) == (0, 0)
    measured.close()


async def test_refusals_before_a_request_is_read_are_those_of_a_full_queue_and_are_counted() -> None:
    """None while a place is free to wait in; each one counts, however it was refused."""
    queue = AdmissionQueue(max_active=1, max_waiting=1)
    assert (queue.refusal(), queue.rejected) == (None, 0)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(queue.entered(0, LATER))
        assert queue.refusal() is None
        waiting = asyncio.create_task(queue.enter(0, LATER, 1))
        while queue.waiting < 1:
            await asyncio.sleep(0)
        refusal = queue.refusal()
        assert refusal is not None
        assert refusal.retry_after_s > 0
        assert queue.rejected == 1
        with pytest.raises(Overloaded):
            await queue.enter(0, LATER, 1)
        assert queue.rejected == 2
    ticket = await waiting
    assert queue.refusal() is None
    queue.leave(ticket)
    assert (queue.active, queue.waiting, queue.rejected) == (0, 0, 2)


async def test_jitter_lengthens_a_hint_by_its_share() -> None:
    class Fixed(random.Random):
        def __init__(self, value: float) -> None:
            super().__init__()
            self._value = value

        def random(self) -> float:
            return self._value

    now_s = asyncio.get_running_loop().time()
    shortest, longest = (AdmissionQueue(1, 1, Fixed(value)).retry_after_s(now_s) for value in (0.0, 1.0))
    assert 0 < shortest <= MAX_RETRY_S
    assert longest == pytest.approx(shortest * (1 + RETRY_JITTER))
