"""How a parent tells a process of its group that is stuck: each touches a file, as a heartbeat, while its event loop runs."""

import asyncio
from typing import NoReturn

from services.process_slot import ProcessSlot

HEARTBEAT_S = 1.0


async def send_heartbeats(slot: ProcessSlot) -> NoReturn:
    """Touch this process's file every HEARTBEAT_S."""
    while True:
        slot.heartbeat_file.touch()
        await asyncio.sleep(HEARTBEAT_S)


class HeartbeatMonitor:
    """Tells whether a process is stuck, from one look each HEARTBEAT_S. No I/O.

    Time is counted in looks, so that what the watching process itself stood still for is not held against the other.
    """

    def __init__(self, looks: int) -> None:
        """looks: without a new heartbeat, after which a process counts as stuck."""
        self._looks, self._unchanged, self._started = looks, 0, False
        self._pid: int | None = None
        self._heartbeat: int | None = None

    def is_stuck(self, pid: int | None, heartbeat: int | None) -> bool:
        """Take in a look. heartbeat: the time of the process's last one, in any unit; None before the first.

        A process that has sent no heartbeat yet is not stuck: it starts.
        """
        if pid != self._pid:
            self._unchanged, self._started = 0, False
        elif heartbeat != self._heartbeat:
            self._unchanged, self._started = 0, True
        else:
            self._unchanged += 1
        self._pid, self._heartbeat = pid, heartbeat
        return pid is not None and self._started and self._unchanged >= self._looks
