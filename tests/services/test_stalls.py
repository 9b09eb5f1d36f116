"""A process that stood still does not take what it missed for the silence of others."""

import asyncio
import time

import pytest

from services.stalls import GRACE_S, STALL_S, TICK_S, StallMeter, StallMonitor


def test_gaps_between_ticks_are_stalls_and_a_busy_loop_is_none() -> None:
    meter = StallMeter(0.0)
    assert meter.observe(TICK_S) == 0
    assert meter.observe(2 * TICK_S + STALL_S) == 0
    assert meter.observe(100.0) == pytest.approx(100 - 2 * TICK_S - STALL_S)
    assert meter.observe(100.1) == meter.observe(100.2)


def test_silence_leaves_stalls_out_and_what_arrived_is_read_first() -> None:
    meter = StallMeter(0.0)
    assert meter.silent_at(0.0, 5.0, 0.0, now=1.0) == 5.0
    assert meter.silent_at(0.0, 5.0, 0.0, now=31.0) == 35.0  # a stall of 30 s
    before_s = meter.observe(31.2)
    assert meter.silent_at(31.2, 5.0, before_s, now=32.0) == 36.2  # it was before the wait began
    meter = StallMeter(0.0)
    for now in (1.0, 2.0, 3.0, 4.0, 4.9):
        meter.observe(now)
    assert meter.silent_at(0.0, 5.0, 0.0, now=10.0) == 10.0 + GRACE_S


async def test_a_loop_that_stood_still_waits_on_for_what_is_due() -> None:
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[str]()
    async with StallMonitor() as stalls:
        loop.call_soon(time.sleep, TICK_S + STALL_S + 0.3)  # the loop stands still for longer than the silence limit
        loop.call_later(0, loop.call_later, 0.3, queue.put_nowait, "here")  # and hears of it only after it has gone on
        assert await stalls.get(queue, silence_s=0.2, deadline_s=loop.time() + 60) == "here"
        assert stalls.total_s() > STALL_S


async def test_silence_and_deadline_end_the_wait() -> None:
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[str]()
    async with StallMonitor() as stalls:
        for silence_s, deadline_s in ((0.05, 60.0), (60.0, 0.05)):
            began = loop.time()
            with pytest.raises(TimeoutError):
                await stalls.get(queue, silence_s, began + deadline_s)
            assert loop.time() - began >= 0.05
        began = loop.time()
        loop.call_soon(time.sleep, TICK_S + STALL_S + 0.3)
        with pytest.raises(TimeoutError):
            await stalls.get(queue, 0.2, began + 60)
        assert loop.time() - began >= TICK_S + STALL_S + 0.3 + GRACE_S, "who stays silent is found all the same"
        loop.call_soon(time.sleep, TICK_S + STALL_S + 0.3)
        with pytest.raises(TimeoutError):
            await stalls.get(queue, 60.0, loop.time() + 0.1)  # a stall does not extend a deadline
