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


def test_the_wait_grows_with_the_load_up_to_a_bound() -> None:
    waits = [wait_s(share / 100) for share in range(0, 131)]
    assert waits == sorted(waits)
    assert wait_s(IDLE_SHARE) == 0
    assert wait_s((IDLE_SHARE + BUSY_SHARE) / 2) > 0
    assert wait_s(BUSY_SHARE) == waits[-1] == MAX_WAIT_S


def _fail() -> None:
    raise ValueError("a fault, of this answer alone")


async def test_nothing_waits_in_a_router_that_has_time() -> None:
    batching, sent = AnswerBatching(Cpu(IDLE_SHARE / 2)), list[int]()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while loop.time() < began_s + 2 * MEASURE_S:
        batching.add(lambda: sent.append(1))
        assert sent.pop() == 1
        await asyncio.sleep(0)


async def test_in_a_busy_router_all_parts_leave_together_in_order_and_no_longer_once_it_has_time() -> None:
    sent, cpu = list[int](), Cpu(1.0)
    batching = AnswerBatching(cpu)
    async with asyncio.timeout(30):
        waits, left = False, asyncio.Event()
        while not waits:  # it measures its load now and then
            left.clear()
            batching.add(left.set)
            waits = not left.is_set()
            await asyncio.sleep(0)
        for number in range(10):
            batching.add(partial(sent.append, number))
            batching.add(_fail)
        assert not sent
        await left.wait()
        assert sent == list(range(10)), "with the one that came before them"
        cpu.rest()
        while waits:
            left.clear()
            batching.add(left.set)
            waits = not left.is_set()
            await left.wait()
