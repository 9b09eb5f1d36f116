"""A process that stood still does not take what it missed for the silence of others."""

import asyncio
import itertools
import time
from typing import Any

import pytest

from penstock.services.stalls import GRACE_S, STALL_S, TICK_S, Listener, SilenceWatch, StallMeter, StallMonitor


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


class Heard(Listener):
    """Somebody who is watched: resolves with why they are given up, and when."""

    def __init__(self, watch: SilenceWatch, silence_s: float, deadline_s: float) -> None:
        super().__init__(silence_s, deadline_s)
        self._watch, self._loop = watch, asyncio.get_running_loop()
        self.given_up: asyncio.Future[tuple[str, float]] = self._loop.create_future()
        watch.begin(self)

    def hear(self) -> None:
        self.heard_s, self.stalled_s = self._watch.now()

    def on_silence(self) -> None:
        self.given_up.set_result(("silent", self._loop.time()))

    def on_deadline(self) -> None:
        self.given_up.set_result(("late", self._loop.time()))


async def test_a_loop_that_stood_still_waits_on_for_what_is_due() -> None:
    loop = asyncio.get_running_loop()
    async with StallMonitor() as stalls:
        watch = SilenceWatch(stalls)
        heard, arrived = Heard(watch, 0.2, loop.time() + 60), asyncio.Event()
        loop.call_soon(time.sleep, TICK_S + STALL_S + 0.3)  # the loop stands still for longer than the silence limit
        loop.call_later(0, loop.call_later, 0.05, arrived.set)  # and hears of it only after it has gone on
        await arrived.wait()
        assert not heard.given_up.done()
        assert stalls.total_s() > STALL_S
        watch.end(heard)


async def test_silence_and_deadline_end_the_wait() -> None:
    loop = asyncio.get_running_loop()
    async with StallMonitor() as stalls:
        watch = SilenceWatch(stalls)
        for silence_s, after_s, expected in ((0.05, 60.0, "silent"), (60.0, 0.05, "late")):
            began = loop.time()
            why, at_s = await Heard(watch, silence_s, began + after_s).given_up
            assert why == expected
            assert at_s - began >= 0.05
        began = loop.time()
        loop.call_soon(time.sleep, TICK_S + STALL_S + 0.3)
        why, at_s = await Heard(watch, 0.2, began + 60).given_up
        assert why == "silent", "who stays silent is found all the same"
        assert at_s - began >= TICK_S + STALL_S + 0.3 + GRACE_S
        loop.call_soon(time.sleep, TICK_S + STALL_S + 0.3)
        why, _ = await Heard(watch, 60.0, loop.time() + 0.1).given_up
        assert why == "late", "a stall does not extend a deadline"


async def test_who_is_heard_costs_no_timer_and_who_has_ended_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), itertools.count()
    call_at = loop.call_at

    def counted(*arguments: Any, **options: Any) -> asyncio.TimerHandle:
        next(timers)
        return call_at(*arguments, **options)

    async with StallMonitor() as stalls:
        watch = SilenceWatch(stalls)
        monkeypatch.setattr(loop, "call_at", counted)
        many = [Heard(watch, 60.0, loop.time() + 3600) for _ in range(100)]
        for _ in range(100):
            for heard in many:
                heard.hear()
        assert next(timers) == 1
        ended = Heard(watch, 0.01, loop.time() + 60)
        watch.end(ended)
        await Heard(watch, 0.02, loop.time() + 60).given_up
        assert not ended.given_up.done()
        for heard in many:
            watch.end(heard)
