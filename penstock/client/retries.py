"""Retries of failed calls: rules, delays and budget. No I/O: time and random numbers are arguments."""

import enum
import threading
from dataclasses import dataclass

import grpc

from penstock.client.errors import MESSAGE_TOO_LARGE, PenstockError

_HINT_JITTER = (
    0.5  # a hint of 4 s gives a delay of 4 to 6 s, so that clients that were refused together do not return together
)
_BURST_S = 10.0  # capacity of the budget, as seconds of its refill rate
_UNCHARGED_FAILURES = 1  # failures of a call before its retries count against the budget

# Messages of gRPC for a broken stream, whose status code is the same as for an error of the server.
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
    """When a client retries a request. Times in seconds.

    A request is retried until its deadline. If the server gives a retry delay, the client waits at least that long, plus a
    random part of up to half of it. Otherwise the delay is drawn uniformly from 0 to a bound that grows with each failure
    (exponential backoff with full jitter).

    attempts: Number of attempts; None: unlimited until the deadline; 1: no retries.
    initial_backoff_s: Bound of the first delay, and of the delay before another router is tried.
    max_backoff_s: Largest bound of a delay.
    backoff_multiplier: Growth of the bound with each failure.
    unavailable_timeout_s: Give up when no router could be reached or serve the request for this long. A router that refuses
        with a retry delay counts as reached. None: only the deadline ends the request.
    retry_ratio: Retries allowed per successful request; bounds the load that retries add to an overloaded mesh.
    retries_per_s: Additional retries allowed to the client as a whole. Further retries wait for the budget. The first retry
    of
        a request, and the first after it received tokens, is free.

    Raises:
        ValueError: A field is out of range; the message names it.
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
        """Bound of the delay after this many consecutive failures (at least 1).

        Example:
            >>> [RetryPolicy().backoff_s(failures) for failures in (1, 2, 3, 20)]
            [0.1, 0.2, 0.4, 5.0]
        """
        growth = self.backoff_multiplier ** min(failures - 1, 64)
        return float(min(self.max_backoff_s, self.initial_backoff_s * growth))

    def pause_s(self, failures: int, hint_s: float, random: float) -> float:
        """Delay before the same router is tried again.

        hint_s: The retry delay from the server, or 0. random: Drawn uniformly from [0, 1).

        Example:
            >>> RetryPolicy().pause_s(failures=1, hint_s=4.0, random=0.5)
            5.0
        """
        return hint_s + random * max(self.backoff_s(failures), _HINT_JITTER * hint_s)


class RetryBudget:
    """Bounds the retries of one client over all its requests. Thread-safe.

    A token bucket: each retry takes a token, each successful request adds `retry_ratio`, each second adds `retries_per_s`.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._ratio, self._per_s = policy.retry_ratio, policy.retries_per_s
        self._capacity = max(1.0, _BURST_S * policy.retries_per_s)
        self._tokens, self._filled_at = self._capacity, float("-inf")
        self._lock = threading.Lock()

    def answered(self) -> None:
        """A request has succeeded."""
        with self._lock:
            self._tokens = min(self._capacity, self._tokens + self._ratio)

    def take(self, now: float) -> bool:
        """Take a token for a retry; False if there is none."""
        with self._lock:
            elapsed_s, self._filled_at = max(0.0, now - self._filled_at), max(now, self._filled_at)
            self._tokens = min(self._capacity, self._tokens + elapsed_s * self._per_s)
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


def is_charged(failures: int) -> bool:
    """Whether a retry after this many consecutive failures counts against the budget."""
    return failures > _UNCHARGED_FAILURES
