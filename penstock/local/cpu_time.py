"""CPU time of processes, from `/proc`. Needs only the standard library."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int, thread: int | None = None) -> float:
    """User and system time of a process, or of one of its threads, so far; 0 for one that has ended."""
    fields = stat_fields(f"{pid}" if thread is None else f"{pid}/task/{thread}")
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def group_cpu_s(pids: Iterable[int]) -> float:
    """User and system time so far of these processes and all below them, those that have ended included.

    No process of `pids` may be below another one of them.
    """
    ticks = 0
    for root in pids:
        for pid in (root, *descendants(root)):
            # its own, and of the children it has waited for
            ticks += sum(map(int, stat_fields(str(pid))[11:15]))
    return ticks / TICKS_PER_S


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


def descendants(pid: int) -> list[int]:
    """All descendants of a process that are running."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := stat_fields(folder.name)):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    below, parents = list[int](), [pid]
    while parents:
        more = children.get(parents.pop(), [])
        below += more
        parents += more
    return below


def stat_fields(path: str) -> list[str]:
    """The fields of `/proc/<path>/stat` from the third on, which is the state; none if there is no such process."""
    try:
        # "pid (name) state ...": the name may hold anything
        return Path(f"/proc/{path}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
