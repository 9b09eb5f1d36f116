"""Returns freed heap memory to the operating system, for processes whose tensors change size with every batch.

The C library keeps freed memory for later allocations. If sizes change all the time, free blocks rarely fit, so the resident
size grows towards the largest total ever used, separately for each allocating thread. One arena for all threads and a release
every few seconds keep it close to the memory in use. Measured on the shipped judge (docs/reference/faults.md): 396 to 525 MiB
instead of 540 to 790 MiB, at the same CPU time per answer; a release takes about 10 ms.
"""

import ctypes
import time
from collections.abc import Callable

RELEASE_S = 5.0  # 10 ms of work in every 5 s is 0.2 % of a core
_M_ARENA_MAX = -8  # malloc.h


def _function(name: str) -> Callable[..., int] | None:
    """A function of the C library; None if it does not have it (only glibc does)."""
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return function


def use_one_arena() -> bool:
    """Let all threads started from now on share one heap. Returns whether the C library supports it."""
    mallopt = _function("mallopt")
    return mallopt is not None and mallopt(_M_ARENA_MAX, 1) == 1


class HeapRelease:
    """Returns free pages to the operating system, at most every `every_s` seconds. Not thread-safe."""

    def __init__(self, every_s: float = RELEASE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._trim = _function("malloc_trim")
        self._last = clock()

    def release_if_due(self) -> bool:
        """Release free pages if it is time. Returns whether it was."""
        now = self._clock()
        if self._trim is None or now - self._last < self._every_s:
            return False
        self._last = now
        self._trim(0)
        return True
