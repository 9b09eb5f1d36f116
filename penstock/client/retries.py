"""Retries of failed calls: rules, delays and budget. No I/O: time and random numbers are arguments."""

import math
import threading
from dataclasses import dataclass
from typing import Annotated

import grpc

from penstock.client.errors import MESSAGE_TOO_LARGE, PenstockError
from penstock.token_bucket import TokenBucket
from penstock.types.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Within, own_range_problems

# A hint of 4 s gives a delay of 4 to 6 s, so that clients that were refused together do not return together.
_HINT_JITTER = 0.5
UNCHARGED_FAILURES = 1  # consecutive failures of a call before its retries count against the budget

# Messages of gRPC for a broken stream, whose status code is the same as for an error of the server.
_BROKEN_STREAM = ("rst_stream", "goaway", "stream removed", "connection reset", "socket closed", "broken pipe")


def is_retryable(failure: PenstockError) -> bool:
    """Whether another attempt may succeed where this one failed."""
    match failure.code:
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            # CANCELLED is by the server or a proxy: the client's own cancellation is no failure.
            return True
        case grpc.StatusCode.UNKNOWN | grpc.StatusCode.INTERNAL:
            # Where gRPC reports a broken stream. The server's own status of this code is final.
            return not failure.reason and any(sign in str(failure).lower() for sign in _BROKEN_STREAM)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            # Where the server is full. A message that is too large stays too large.
            return failure.reason != MESSAGE_TOO_LARGE
    return False  # another attempt would end the same way, or must not be made


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

    attempts: Annotated[int | None, COUNT] = None
    initial_backoff_s: Annotated[float, POSITIVE] = 0.1
    max_backoff_s: Annotated[float, POSITIVE] = 5.0
    backoff_multiplier: Annotated[float, Within(1)] = 2.0
    unavailable_timeout_s: Annotated[float | None, NOT_NEGATIVE] = 60.0
    retry_ratio: Annotated[float, NOT_NEGATIVE] = 1.0
    retries_per_s: Annotated[float, POSITIVE] = 10.0

    def __post_init__(self) -> None:
        for each in own_range_problems(self):
            raise ValueError(f"{each.field}: {each.problem}")
        if self.initial_backoff_s > self.max_backoff_s:
            raise ValueError("initial_backoff_s: must be at most max_backoff_s")

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
        self._ratio, self._bucket = policy.retry_ratio, TokenBucket(policy.retries_per_s, -math.inf)
        self._lock = threading.Lock()

    def answered(self) -> None:
        """A request has succeeded."""
        with self._lock:
            self._bucket.add(self._ratio)

    def take(self, now: float) -> bool:
        """Take a token for a retry; False if there is none."""
        with self._lock:
            return self._bucket.take(now)
