"""Clocks. Pure code gets a clock as an argument and does not read the time itself."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock (`now`) and Unix time (`wall`), in seconds."""

    def now(self) -> float: ...

    def wall(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The clocks of the operating system."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)
