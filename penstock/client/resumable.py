"""One request as a client holds it: what to send and where, what has come, how to go on after a failure. No I/O.

Both clients drive it the same way. Before each attempt they wait as long as `wait_s` says, then send `message()` to the
router with the number `router`, pass each response to `take`, and a failure to `failed`. An attempt that failed before the
first token is made again as it was; after it, the next attempt asks for the rest behind the tokens that have come, so the
caller sees every token once.
"""

import math
import random
from dataclasses import dataclass, field

import grpc

from penstock.client import errors, transport, types
from penstock.client.retries import RetryBudget, RetryPolicy, is_charged, is_retryable
from penstock.proto.router.v1 import router_pb2 as pb

MISSED_HEARTBEATS = 3  # a router is not silent before it has left out this many
_ID_CHARACTERS = 120  # of a request id that is kept when a number is put behind it; 128 are allowed


class Routers:
    """What a client knows of its routers, shared by its requests. Routers are numbered as they were given."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.preferred = 0
        """Where new requests begin."""
        self.heartbeat_s: list[float | None] = [None] * count
        """Longest time between two messages of a stream, as each router announced it; None: not announced."""

    def in_order(self) -> list[int]:
        """All routers, the preferred one first."""
        return [(self.preferred + i) % self.count for i in range(self.count)]

    def failed(self, router: int) -> None:
        """New requests begin at the next router."""
        if self.preferred == router:
            self.preferred = (router + 1) % self.count

    def silence_s(self, router: int, silence_s: float) -> float | None:
        """Silence after which a stream of this router counts as broken; None without heartbeats: then it says nothing."""
        heartbeat_s = self.heartbeat_s[router]
        return max(silence_s, MISSED_HEARTBEATS * heartbeat_s) if heartbeat_s is not None else None


@dataclass(slots=True)
class _Router:
    """One request's experience with one router."""

    attempts: int = 0
    failures: int = 0  # in a row, without a token between them
    not_before_s: float = -math.inf


@dataclass(slots=True)
class ResumableRequest:
    """State of one request. Times are one monotonic clock's, in seconds.

    deadline_s: No attempt begins at or after it.
    """

    prompt: types.Prompt
    options: types.Options
    policy: RetryPolicy
    routers: Routers
    budget: RetryBudget
    deadline_s: float
    rng: random.Random = field(default_factory=random.Random)
    router: int = field(init=False)
    _request: pb.GenerateRequest = field(init=False)
    _tried: list[_Router] = field(init=False)
    _attempts: int = 0
    _failures: int = 0  # in a row, without a token between them
    _unavailable_since_s: float | None = None
    _send_at_s: float = -math.inf
    _last_failure: errors.PenstockError | None = None
    _answered: bool = False  # the current attempt has left the router's queue
    _request_id: str | None = None
    _accepted: types.Accepted | None = None
    _tier: str = ""
    _token_ids: list[int] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _logprobs: list[types.PositionLogprobs] = field(default_factory=list)
    _finished: types.Finished | None = None

    def __post_init__(self) -> None:
        self._request = transport.request_to_proto(self.prompt, self.options)
        self._request_id = self.options.request_id
        self.router = self.routers.preferred
        self._tried = [_Router() for _ in range(self.routers.count)]

    @property
    def finished(self) -> bool:
        return self._finished is not None

    def wait_s(self, now: float) -> float:
        """Seconds to wait before asking again; 0: send the next attempt now.

        Raises:
            PenstockError: The last failure, where the deadline leaves no time for another attempt.
        """
        failure = self._last_failure
        if failure is None:
            return 0.0
        if self._send_at_s <= now and is_charged(self._failures) and not self.budget.take(now):
            self._send_at_s = now + self.rng.uniform(0.5, 1.0) * self.policy.backoff_s(self._failures)
        if max(now, self._send_at_s) >= self.deadline_s:
            raise failure
        return max(0.0, self._send_at_s - now)

    def message(self) -> pb.GenerateRequest:
        """The request of the next attempt, to be sent to `router`."""
        self._attempts += 1
        self._answered = False
        tried = self._tried[self.router]
        if self._request_id is not None:
            # At a router that has seen the id the broken attempt may still be ending under it.
            again = f"{self._request_id[:_ID_CHARACTERS]}-{self._attempts - 1}"
            self._request.request_id = again if tried.attempts else self._request_id
        tried.attempts += 1
        if self._token_ids:
            assert self._accepted is not None
            self._request.sampling.seed = self._accepted.seed
            self._request.resume.CopyFrom(pb.Resume(tier=self._tier, token_ids=self._token_ids))
        return self._request

    def silence_s(self, silence_s: float) -> float | None:
        """Silence after which the current attempt has failed, where its router has announced heartbeats."""
        return self.routers.silence_s(self.router, silence_s)

    def take(self, response: pb.GenerateResponse) -> types.Event | None:
        """Keep what came; return the event to hand on, None where the caller need not see it.

        Raises:
            UnavailableError: The router sent tokens that are not the next ones.
        """
        self._answered = self._answered or not response.HasField("heartbeat")
        heartbeat_s = transport.heartbeat_interval_s(response)
        if heartbeat_s is not None or response.HasField("accepted"):  # a router may have become an older one
            self.routers.heartbeat_s[self.router] = heartbeat_s
        event = transport.event_from_proto(response)
        match event:
            case types.Accepted():
                if self._accepted is not None:
                    return None
                self._accepted, self._request_id = event, event.request_id
                return event
            case None:
                return None
            case types.Tokens():
                if event.offset != len(self._token_ids):
                    raise errors.UnavailableError(
                        f"the router sent tokens from position {event.offset}, not {len(self._token_ids)}",
                        code=grpc.StatusCode.UNAVAILABLE,
                    )
                self._tier = event.tier
                self._token_ids += event.token_ids
                self._text.append(event.text)
                self._logprobs += event.logprobs
                if event.token_ids:
                    self._failures = self._tried[self.router].failures = 0
            case types.Finished():
                self._finished = event
                self.budget.answered()
        self._unavailable_since_s = None
        return event

    def failed(self, failure: errors.PenstockError, now: float) -> None:
        """The current attempt has failed: choose where and when to try again.

        Raises:
            PenstockError: `failure`, where another attempt cannot help or is not allowed; of a deadline that passed before
                the attempt was answered, the refusal that came before it.
        """
        refused_before = isinstance(self._last_failure, errors.OverloadedError)
        if isinstance(failure, errors.DeadlineError) and not self._answered and refused_before:
            assert self._last_failure is not None
            raise self._last_failure
        self._last_failure = failure
        if not is_retryable(failure) or self._attempts == self.policy.attempts:
            raise failure
        self._failures += 1
        self.routers.failed(self.router)
        self._check_unavailable(failure, now)
        tried = self._tried[self.router]
        tried.failures += 1
        hint_s = max(0.0, failure.retry_after_s) if isinstance(failure, errors.OverloadedError) else 0.0
        tried.not_before_s = now + self.policy.pause_s(tried.failures, hint_s, self.rng.random())
        if tried.not_before_s >= self.deadline_s > now + hint_s:
            tried.not_before_s = self.rng.uniform(now + hint_s, self.deadline_s)
        others = [(self.router + i) % self.routers.count for i in range(1, self.routers.count)]
        self.router = min((*others, self.router), key=lambda other: max(now, self._tried[other].not_before_s))
        spread_s = self.rng.random() * self.policy.initial_backoff_s  # all streams of a router that died come at once
        self._send_at_s = max(self._tried[self.router].not_before_s, min(now + spread_s, self.deadline_s))

    def ended(self) -> None:
        """The attempt has ended without an error; it must have finished the answer.

        Raises:
            UnavailableError: It has not.
        """
        if self._finished is None:
            raise errors.UnavailableError("the router ended the stream early", code=grpc.StatusCode.UNAVAILABLE)

    def reply(self) -> types.Reply:
        """The whole answer; the request must be finished."""
        assert self._finished is not None
        assert self._accepted is not None
        done = self._finished
        return types.Reply(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=done.reason,
            tier=done.tier,
            usage=done.usage,
            tiers=done.tiers,
            ttft_s=done.ttft_s,
            total_s=done.total_s,
            request_id=self._accepted.request_id,
            trace_id=done.trace_id,
            tool_calls=done.tool_calls,
            content="".join(self._text) if done.content is None else done.content,
        )

    def _check_unavailable(self, failure: errors.PenstockError, now: float) -> None:
        """Raise `failure` where no router has taken the request for `unavailable_timeout_s`."""
        if isinstance(failure, errors.OverloadedError):
            self._unavailable_since_s = None
            return
        if self._unavailable_since_s is None:
            self._unavailable_since_s = now
        limit_s = self.policy.unavailable_timeout_s
        if limit_s is not None and now - self._unavailable_since_s >= limit_s:
            raise failure
