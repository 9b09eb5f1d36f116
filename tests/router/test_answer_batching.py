"""Parts of answers wait for each other only in a busy router, and never for long."""

import asyncio
from functools import partial

from router_service.answer_batching import BUSY_SHARE, IDLE_SHARE, MAX_WAIT_S, MEASURE_S, AnswerBatching, wait_s


class Cpu:
    """CPU time of an event loop that is so busy."""

    def __init__(self, busy: float) -> None:
        self.busy, self._loop = busy, asyncio.get_running_loop()
        self._began_s, self._spent_s = self._loop.time(), 0.0

    def __call__(self) -> float:
        return self._spent_s + self.busy * (self._loop.time() - self._began_s)

    def rest(self) -> None:
        """Be idle from now on."""
        self._spent_s, self.busy = self(), 0.0


def fault() -> None:
    raise LookupError("of this answer alone")


def test_the_wait_grows_with_the_load_up_to_a_bound() -> None:
    waits = [wait_s(share / 100) for share in range(0, 131)]
    assert waits == sorted(waits)
    assert wait_s(IDLE_SHARE) == 0
    assert wait_s((IDLE_SHARE + BUSY_SHARE) / 2) > 0
    assert wait_s(BUSY_SHARE) == waits[-1] == MAX_WAIT_S


async def test_nothing_waits_in_a_router_that_has_time() -> None:
    batching, loop = AnswerBatching(Cpu(IDLE_SHARE / 2)), asyncio.get_running_loop()
    began_s = loop.time()
    while loop.time() < began_s + 2 * MEASURE_S:  # it measures its load now and then
        assert not batching.waits()
        await asyncio.sleep(0)


async def test_in_a_busy_router_all_parts_leave_together_in_order_and_nothing_waits_once_it_has_time() -> None:
    sent, cpu = list[int](), Cpu(1.0)
    batching, left = AnswerBatching(cpu), asyncio.Event()
    async with asyncio.timeout(60):
        while not batching.waits():
            await asyncio.sleep(0)
        for number in range(10):
            batching.add(partial(sent.append, number))
            batching.add(fault)
        batching.add(left.set)
        assert not sent
        await left.wait()
        assert sent == list(range(10))
        cpu.rest()
        while batching.waits():
            await asyncio.sleep(0)
