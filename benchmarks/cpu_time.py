"""CPU time of single processes and threads, from `/proc`."""

import contextlib
from pathlib import Path

from penstock.local.cpu_time import TICKS_PER_S, stat_fields


def cpu_s(pid: int, thread: int | None = None) -> float:
    """User and system time of a process, or of one of its threads, so far; 0 for one that has ended."""
    fields = stat_fields(f"{pid}" if thread is None else f"{pid}/task/{thread}")
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def scheduled_s(pid: int) -> dict[int, tuple[float, float]]:
    """By thread of a process: seconds on a core, and seconds ready to run without one, so far.

    Empty for a process that has ended, and where the kernel does not tell (CONFIG_SCHED_INFO).
    """
    result = {}
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            ran_ns, waited_ns = thread.read_text().split()[:2]
            result[int(thread.parent.name)] = int(ran_ns) / 1e9, int(waited_ns) / 1e9
    return result
