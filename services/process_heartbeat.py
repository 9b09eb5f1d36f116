"""Detects stuck processes of a group: each process touches a file, as its heartbeat, while its event loop runs."""

import os
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from penstock.services.process_slot import ProcessSlot
from penstock.services.ticks import tick

HEARTBEAT_S = 1.0


async def send_heartbeats(slot: ProcessSlot) -> NoReturn:
    """Touch this process's file every HEARTBEAT_S; clean up at the end."""
    parent = os.getppid()
    try:
        while True:
            slot.heartbeat_file.touch()
            await tick(HEARTBEAT_S)
    finally:
        clean_up(slot, parent)


def clean_up(slot: ProcessSlot, parent: int) -> None:
    """Remove this process's file, and the group's folder if the parent, by its process id, has ended and cannot do it."""
    slot.heartbeat_file.unlink(missing_ok=True)
    if os.getppid() != parent:
        with suppress(OSError):  # another process still has its files there, and removes the folder
            Path(slot.folder).rmdir()


class HeartbeatMonitor:
    """Detects whether a process is stuck, with one check every HEARTBEAT_S. No I/O.

    Time is counted in checks, so that time for which the checking process was stopped itself does not count.
    """

    def __init__(self, checks: int) -> None:
        """checks: a process is stuck after this many checks without a new heartbeat."""
        self._checks, self._unchanged, self._started = checks, 0, False
        self._pid: int | None = None
        self._heartbeat: int | None = None

    def is_stuck(self, pid: int | None, heartbeat: int | None) -> bool:
        """Check the process. heartbeat: the time of its last heartbeat, in any unit; None before the first.

        A process that has sent no heartbeat yet is starting, and not stuck.
        """
        if pid != self._pid:
            self._unchanged, self._started = 0, False
        elif heartbeat != self._heartbeat:
            self._unchanged, self._started = 0, True
        else:
            self._unchanged += 1
        self._pid, self._heartbeat = pid, heartbeat
        return pid is not None and self._started and self._unchanged >= self._checks
