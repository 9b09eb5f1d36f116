"""Waits for conditions, and whether a process runs."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
LIMIT_S = 300.0
"""However slow the machine is."""


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def until_answered(condition: Callable[[], Awaitable[T]]) -> T:
    """For conditions that are asked of somebody; the value of the condition."""
    async with asyncio.timeout(LIMIT_S):
        while not (value := await condition()):
            await asyncio.sleep(0.02)
    return value


def until_now(condition: Callable[[], T]) -> T:
    """Without an event loop; the value of the condition."""
    end = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
