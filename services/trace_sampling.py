"""Which requests are traced: decided once, where a request enters the mesh. No I/O, no clock: times are handed in.

A trace costs about a third of a millisecond of CPU in the router, as much in the other services, and a write to Redis. So the
number of traces is bounded, whatever clients send.
"""

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

from penstock.token_bucket import TokenBucket

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class Caller(enum.Enum):
    """What the caller's trace context says of its own trace."""

    SILENT = "silent"
    """There is none, or it is malformed."""
    SAMPLED = "sampled"
    NOT_SAMPLED = "not_sampled"

    @classmethod
    def of(cls, traceparent: str | None) -> "Caller":
        """From the header of W3C Trace Context."""
        if traceparent is None or not _TRACEPARENT.fullmatch(traceparent) or traceparent.startswith("ff"):
            return cls.SILENT
        return cls.SAMPLED if int(traceparent[53:55], 16) & 1 else cls.NOT_SAMPLED


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """How many requests are traced.

    share: of all requests, from 0 to 1. per_s: traces per second that the share does not count, of each of three kinds:
    requests as they come, requests whose callers ask for a trace, and requests that failed or were slow.
    """

    share: float
    per_s: float


NOTHING = SamplingLimits(share=0.0, per_s=0.0)


class TraceSampler:
    """Decides for one process. All times are of a monotonic clock, in seconds. draw: a random number from 0 to 1."""

    def __init__(self, limits: SamplingLimits, now_s: float, draw: Callable[[], float]) -> None:
        self._share, self._draw = limits.share, draw
        self._unasked, self._asked, self._late = (TokenBucket(limits.per_s, now_s) for _ in range(3))

    def samples(self, caller: Caller, now_s: float) -> bool:
        """Whether a request that begins now is traced. A caller that does not sample its own trace gets none here either."""
        if caller is Caller.NOT_SAMPLED:
            return False
        if self._share and (self._share >= 1 or self._draw() < self._share):
            return True
        return (self._asked if caller is Caller.SAMPLED else self._unasked).take(now_s)

    def keeps(self, now_s: float) -> bool:
        """Whether a request that was not traced, and has failed or was slow, gets a trace at its end."""
        return self._share >= 1 or self._late.take(now_s)
