"""CPU time of processes, from `/proc`. Needs only the standard library."""

import os
from collections.abc import Iterable
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


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
