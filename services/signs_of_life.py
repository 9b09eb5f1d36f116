"""How the parent of several processes tells one that is stuck: each touches a file while its event loop runs."""

import asyncio
from typing import NoReturn

from services.process_slot import ProcessSlot

SIGN_S = 1.0  # between two signs of life


async def give_signs(slot: ProcessSlot) -> NoReturn:
    """Touch this process's file, for ever."""
    while True:
        slot.sign_of_life.touch()
        await asyncio.sleep(SIGN_S)


class SignMonitor:
    """Tells whether a process is stuck, from one look each SIGN_S. No I/O.

    Time is counted in looks, so that what the watching process itself stood still for is not held against the other.
    """

    def __init__(self, looks: int) -> None:
        """looks: without a new sign, after which a process counts as stuck."""
        self._looks, self._unchanged, self._begun = looks, 0, False
        self._pid: int | None = None
        self._sign: int | None = None

    def is_stuck(self, pid: int | None, sign: int | None) -> bool:
        """Look at a process. sign: the time of its last one, in any unit; None where there is none.

        A process that has given no sign yet is not stuck: it starts.
        """
        if pid != self._pid:
            self._unchanged, self._begun = 0, False
        elif sign != self._sign:
            self._unchanged, self._begun = 0, True
        else:
            self._unchanged += 1
        self._pid, self._sign = pid, sign
        return pid is not None and self._begun and self._unchanged >= self._looks
