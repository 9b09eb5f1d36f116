"""When a failed call is made again: the rules, the pauses and the budget. No I/O: time and random numbers are handed in."""

import enum
import threading
from dataclasses import dataclass

import grpc

from penstock.client.errors import MESSAGE_TOO_LARGE, PenstockError

_HINT_JITTER = 0.5  # a hint of 4 s gives a pause of 4 to 6 s: those who were refused together do not come back together
_BURST_S = 10.0  # the budget holds what this many seconds add to it
_UNCHARGED_FAILURES = 1  # of a call, before its retries count against the budget

# How gRPC describes a stream that broke, where the status code alone does not tell it from a fault of the server.
_BROKEN_STREAM = ("rst_stream", "goaway", "stream removed", "connection reset", "socket closed", "broken pipe")


class RetryRule(enum.Enum):
    """What a status code means for the next attempt."""

    RETRY = enum.auto()
    """Nothing is wrong with the request itself: another attempt may be answered."""
    RETRY_IF_BROKEN = enum.auto()
    """Where gRPC reports a broken stream. The server's own status of this code is final."""
    RETRY_IF_REFUSED = enum.auto()
    """Where the server is full. A message that is too large stays too large."""
    RAISE = enum.auto()
    """Another attempt would end the same way, or must not be made."""


RETRY_RULES: dict[grpc.StatusCode, RetryRule] = {
    grpc.StatusCode.OK: RetryRule.RAISE,
    grpc.StatusCode.CANCELLED: RetryRule.RETRY,  # by the server or a proxy: the client's own cancellation is no failure
    grpc.StatusCode.UNKNOWN: RetryRule.RETRY_IF_BROKEN,
    grpc.StatusCode.INVALID_ARGUMENT: RetryRule.RAISE,
    grpc.StatusCode.DEADLINE_EXCEEDED: RetryRule.RAISE,
    grpc.StatusCode.NOT_FOUND: RetryRule.RAISE,
    grpc.StatusCode.ALREADY_EXISTS: RetryRule.RAISE,
    grpc.StatusCode.PERMISSION_DENIED: RetryRule.RAISE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: RetryRule.RETRY_IF_REFUSED,
    grpc.StatusCode.FAILED_PRECONDITION: RetryRule.RAISE,  # the request itself fails wherever it runs
    grpc.StatusCode.ABORTED: RetryRule.RAISE,
    grpc.StatusCode.OUT_OF_RANGE: RetryRule.RAISE,
    grpc.StatusCode.UNIMPLEMENTED: RetryRule.RAISE,
    grpc.StatusCode.INTERNAL: RetryRule.RETRY_IF_BROKEN,
    grpc.StatusCode.UNAVAILABLE: RetryRule.RETRY,
    grpc.StatusCode.DATA_LOSS: RetryRule.RAISE,
    grpc.StatusCode.UNAUTHENTICATED: RetryRule.RAISE,
}


def is_retryable(failure: PenstockError) -> bool:
    """Whether another attempt may succeed where this one failed."""
    match RETRY_RULES.get(failure.code, RetryRule.RAISE):
        case RetryRule.RETRY:
            return True
        case RetryRule.RETRY_IF_BROKEN:
            return not failure.reason and any(sign in str(failure).lower() for sign in _BROKEN_STREAM)
        case RetryRule.RETRY_IF_REFUSED:
            return failure.reason != MESSAGE_TOO_LARGE
        case RetryRule.RAISE:
            return False


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long, how often and how fast a client repeats a request. Times in seconds.

    A call is repeated until its deadline. Where the server says when to come back, the pause is at least that long, with
    up to half of it added at random; otherwise it is drawn evenly from 0 to a bound that grows with each failure
    (exponential backoff with full jitter).

    attempts: Calls in all; None: as many as fit before the deadline; 1: never repeat.
    initial_backoff_s: Bound of the first pause, and of the pause before another router is tried.
    max_backoff_s: Largest bound of a pause without a hint.
    backoff_multiplier: Growth of the bound with each failure.
    unavailable_timeout_s: A call gives up once no router could be reached, or none could serve it, for this long. A router
        that refuses with a hint has been reached. None: only the deadline ends it.
    retry_ratio: Retries allowed for each call that was answered; bounds what retries add to the load of a full mesh.
    retries_per_s: Retries allowed besides, by the whole client. Later ones wait; none is given up for want of budget. The
        first retry of a call, and the first after it received tokens, is free.

    Raises:
        ValueError: A field is out of its range; the message names it.
    """

    attempts: int | None = None
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    backoff_multiplier: float = 2.0
    unavailable_timeout_s: float | None = 60.0
    retry_ratio: float = 1.0
    retries_per_s: float = 10.0

    def __post_init__(self) -> None:
        if self.attempts is not None and self.attempts < 1:
            raise ValueError(f"attempts: must be at least 1, not {self.attempts}")
        if not 0 < self.initial_backoff_s <= self.max_backoff_s < float("inf"):
            raise ValueError("initial_backoff_s: must be over 0 and at most max_backoff_s, which must be finite")
        if not 1 <= self.backoff_multiplier < float("inf"):
            raise ValueError(f"backoff_multiplier: must be at least 1, not {self.backoff_multiplier}")
        if self.unavailable_timeout_s is not None and not self.unavailable_timeout_s >= 0:
            raise ValueError(f"unavailable_timeout_s: must not be negative, not {self.unavailable_timeout_s}")
        if not 0 <= self.retry_ratio < float("inf"):
            raise ValueError(f"retry_ratio: must be 0 or more, not {self.retry_ratio}")
        if not 0 < self.retries_per_s < float("inf"):
            raise ValueError(f"retries_per_s: must be over 0, not {self.retries_per_s}")

    def backoff_s(self, failures: int) -> float:
        """Bound of the pause after so many failures in a row, at least 1."""
        growth = self.backoff_multiplier ** min(failures - 1, 64)
        return float(min(self.max_backoff_s, self.initial_backoff_s * growth))

    def pause_s(self, failures: int, hint_s: float, random: float) -> float:
        """Pause before the same router is asked again.

        hint_s: What the server asked for, 0 where it did not say. random: Drawn evenly from [0, 1).
        """
        return hint_s + random * max(self.backoff_s(failures), _HINT_JITTER * hint_s)


class RetryBudget:
    """Bounds the retries of one client, however many calls it makes. Safe to share between threads.

    A token bucket: each retry takes a token, each answered call adds `retry_ratio`, each second adds `retries_per_s`.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._ratio, self._per_s = policy.retry_ratio, policy.retries_per_s
        self._most = max(1.0, _BURST_S * policy.retries_per_s)
        self._tokens, self._filled_at = self._most, float("-inf")
        self._lock = threading.Lock()

    def answered(self) -> None:
        """A call has been answered."""
        with self._lock:
            self._tokens = min(self._most, self._tokens + self._ratio)

    def take(self, now: float) -> bool:
        """Whether a retry may be made now; takes its token."""
        with self._lock:
            elapsed_s, self._filled_at = max(0.0, now - self._filled_at), max(now, self._filled_at)
            self._tokens = min(self._most, self._tokens + elapsed_s * self._per_s)
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


def is_charged(failures: int) -> bool:
    """Whether the retry after so many failures without a token between them counts against the budget."""
    return failures > _UNCHARGED_FAILURES
