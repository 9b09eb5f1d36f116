"""Periodic work at common times: a process that waits wakes once for all of it, which costs more than most of that work."""

import asyncio
import math
import random

_PHASE_S = random.random()  # of this process: those of a host do not all wake at the same time


def next_tick_s(now_s: float, period_s: float) -> float:
    """The time of the next tick, on the clock of `now_s`. All ticks of 1 s are ticks of 0.5 s and of 0.25 s, too."""
    ticks = math.floor((now_s - _PHASE_S) / period_s) + 1
    return ticks * period_s + _PHASE_S


async def tick(period_s: float) -> None:
    """Wait for the next tick: at most `period_s`."""
    now_s = asyncio.get_running_loop().time()
    await asyncio.sleep(next_tick_s(now_s, period_s) - now_s)
