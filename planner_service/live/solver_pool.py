"""Planning jobs in processes of their own: the event loop stays free, and a job without a caller is killed at once."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator

from penstock.services.domain.errors import InvalidRequest, PenstockError
from penstock.types.problems import FieldProblem

_log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "penstock.planner_service.live.solver")
JOBS = max(1, (os.cpu_count() or 2) - 1)  # at once; more wait
STAGES_LIMIT_S = 600.0
"""What a choice of length stages may take: replays on the greatest trace that is accepted take some minutes."""


class SolverFailed(PenstockError):
    """A solver process ended before its job did."""

    reason = "SOLVER_FAILED"


class SolverTimedOut(SolverFailed):
    """A job took longer than its caller lets it, and was ended."""


class SolverPool:
    """At most `jobs` solver processes at once. `pids`: of those that run."""

    def __init__(self, jobs: int = JOBS) -> None:
        self._places = asyncio.Semaphore(jobs)
        self.pids: set[int] = set()

    async def run(self, method: str, payload: bytes, limit_s: float | None = None) -> AsyncGenerator[bytes, None]:
        """The job's serialised responses, as they come. Leaving the iteration kills its process.

        limit_s: from the start of its process; None for no limit. A job that takes longer is killed.

        Raises:
            InvalidRequest: a field of the request is invalid.
            SolverTimedOut: the job took longer than limit_s.
            SolverFailed: its process ended before.
        """
        async with self._places:
            process = await asyncio.create_subprocess_exec(*COMMAND, method, stdin=PIPE, stdout=PIPE)
            self.pids.add(process.pid)
            deadline = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                with contextlib.suppress(ConnectionError):  # it died: its end of stdout tells
                    process.stdin.write(len(payload).to_bytes(4) + payload)
                    await process.stdin.drain()
                while True:
                    try:
                        async with asyncio.timeout_at(deadline):
                            kind, content = await _frame(process)
                    except TimeoutError:
                        raise SolverTimedOut(f"the job took more than {limit_s:g} s") from None
                    if kind == b"R":
                        yield content
                    elif kind == b"F":
                        raise InvalidRequest(*(FieldProblem(*problem) for problem in json.loads(content)))
                    else:
                        return
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                self.pids.discard(process.pid)

    async def once(self, method: str, payload: bytes, limit_s: float | None = None) -> bytes:
        """The last response of a job. limit_s and errors as in `run`."""
        async with contextlib.aclosing(self.run(method, payload, limit_s)) as answers:
            return [answer async for answer in answers][-1]


async def _frame(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """(kind, content) of the next frame; SolverFailed when the process ends instead."""
    assert process.stdout is not None
    try:
        head = await process.stdout.readexactly(5)
        return head[:1], await process.stdout.readexactly(int.from_bytes(head[1:]))
    except asyncio.IncompleteReadError:
        status = await process.wait()
    if status < 0:
        why = f"was killed by {signal.Signals(-status).name}"
        why += " (out of memory?)" if -status == signal.SIGKILL else ""
    else:
        why = f"ended with status {status}; the planner's log says why"
    _log.error("a solver process %s", why)
    raise SolverFailed(f"the solver process {why}")
