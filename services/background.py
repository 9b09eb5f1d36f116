"""Background tasks have an owner that ends them, and none fails unseen.

What runs for as long as its owner is started by `supervise`. A task that belongs to one request, and that its owner awaits
before it returns, may be created directly; tests/services/test_background.py lists the modules that do.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)

failures: Counter[str] = Counter()
"""Failures of this process's background tasks, by name: the metric `penstock.background.failures`."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start a failed task again after `first_s` seconds, twice as long after each failure in a row, up to `most_s`.

    steady_s: a task that has run for so long begins with short pauses again.
    """

    first_s: float = 0.1
    most_s: float = 10.0
    steady_s: float = 60.0

    def pause_s(self, failed: int) -> float:
        """Before the next start, after so many failures in a row."""
        return min(self.most_s, self.first_s * 2.0 ** min(failed - 1, 32))


@dataclass(frozen=True, slots=True)
class EndProcess:
    """Report the error to `report`, which ends the process (`Chassis.fail`); the task is not started again."""

    report: Callable[[BaseException], None]


class UnexpectedEnd(Exception):
    """A background task that runs for ever has returned, or was cancelled by somebody who does not own it."""


def supervise(
    name: str,
    factory: Callable[[], Coroutine[Any, Any, object]],
    policy: Restart | EndProcess = Restart(),
    *,
    endless: bool = True,
) -> "asyncio.Task[None]":
    """Run `factory()` in the background until its owner ends the task with `end`.

    A failure is counted in `failures`, logged once with its traceback, and then handled by `policy`. Cancellation of the task
    is its normal end. endless: returning is a failure as well; otherwise it ends the task.
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
        in_a_row = 1 if loop.time() - started_at >= policy.steady_s else in_a_row + 1
        pause_s = policy.pause_s(in_a_row)
        record_failure(name, error, f"started again in {pause_s:g} s")
        await asyncio.sleep(pause_s)


def record_failure(name: str, error: BaseException, consequence: str) -> None:
    """Count and log the failure of something that runs in the background, a task or a thread."""
    failures[name] += 1
    _log.error("background task %s failed: %s", name, consequence, exc_info=error)


async def end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and return once they have ended, whatever they end with.

    They are cancelled again until they have: a library may swallow a cancellation that comes together with what it was
    waiting for (seen with redis-py 8.1 when a reply to a pipeline has just arrived).
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.2)
