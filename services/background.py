"""Background tasks: each has an owner that ends it, and failures are counted and logged.

Tasks that run as long as their owner are started by `supervise`. A task of one request that its owner awaits before it
returns may be created directly; tests/services/test_background.py lists the modules that do so.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

failures: Counter[str] = Counter()
"""Failures of this process's background tasks, by name: the metric `penstock.background.failures`."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart a failed task after `first_s` seconds; each further failure doubles the delay, up to `most_s`.

    steady_s: a task that has run this long starts with the shortest delay again.
    """

    first_s: float = 0.1
    most_s: float = 10.0
    steady_s: float = 60.0

    def in_a_row(self, failed: int, ran_s: float) -> int:
        """Consecutive failures with one more, after the task has run for `ran_s`."""
        return 1 if ran_s >= self.steady_s else failed + 1

    def pause_s(self, failed: int) -> float:
        """Delay before the next start after this many consecutive failures."""
        return min(self.most_s, self.first_s * 2.0 ** min(failed - 1, 32))


@dataclass(frozen=True, slots=True)
class EndProcess:
    """Pass the error to `report`, which ends the process (`Chassis.fail`); the task is not restarted."""

    report: Callable[[BaseException], None]


class UnexpectedEnd(Exception):
    """An endless background task returned, or was cancelled by another task than its owner."""


def supervise(
    name: str,
    factory: Callable[[], Coroutine[Any, Any, object]],
    policy: Restart | EndProcess = Restart(),
    *,
    endless: bool = True,
) -> "asyncio.Task[None]":
    """Run `factory()` in the background until its owner ends the task with `end`.

    A failure is counted in `failures`, logged with its traceback, and handled by `policy`. Cancellation is the normal end of
    a task. endless: returning is a failure too.
    """
    return asyncio.create_task(_supervised(name, factory, policy, endless), name=name)


async def _supervised(
    name: str, factory: Callable[[], Coroutine[Any, Any, object]], policy: Restart | EndProcess, endless: bool
) -> None:
    loop, task, in_a_row = asyncio.get_running_loop(), asyncio.current_task(), 0
    assert task is not None
    while True:
        started_at = loop.time()
        try:
            await factory()
            if not endless:
                return
            raise UnexpectedEnd(f"{name} returned")
        except asyncio.CancelledError as cancelled:
            if task.cancelling():
                raise
            error: Exception = UnexpectedEnd(f"{name} was cancelled from within")
            error.__cause__ = cancelled
        except Exception as raised:
            error = raised
        if isinstance(policy, EndProcess):
            record_failure(name, error, "the process ends")
            policy.report(error)
            return
        in_a_row = policy.in_a_row(in_a_row, loop.time() - started_at)
        pause_s = policy.pause_s(in_a_row)
        record_failure(name, error, f"restarting in {pause_s:g} s")
        await asyncio.sleep(pause_s)


def record_failure(name: str, error: BaseException, consequence: str) -> None:
    """Count and log the failure of a background task or thread."""
    failures[name] += 1
    _log.error("background task %s failed: %s", name, consequence, exc_info=error)


async def end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and wait until they have ended. Their results and errors are ignored.

    Cancellation is repeated until a task ends: a library may swallow one that coincides with the event it waits for (seen
    with redis-py 8.1 when the reply to a pipeline has just arrived).
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.2)


Works = Mapping[str, Callable[[], Coroutine[Any, Any, object]]]
"""Endless work, by the names of its tasks."""


class BackgroundWork(ABC):
    """Work that is done as long as the context lasts."""

    _tasks: "tuple[asyncio.Task[None], ...]" = ()

    @abstractmethod
    def work(self) -> Works:
        """What is done."""

    async def __aenter__(self) -> Self:
        self._tasks = tuple(supervise(name, factory) for name, factory in self.work().items())
        return self

    async def __aexit__(self, *_: object) -> None:
        await end(*self._tasks)


async def gathered(*coroutines: Coroutine[Any, Any, _T]) -> list[_T]:
    """The results of coroutines that run at the same time. After a failure or a cancellation, the others are ended."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end(*tasks)
