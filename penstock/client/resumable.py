"""The state of a request that can be resumed: the next message, the tokens received, retries after failures. No I/O.

Both clients drive it in the same way: before each attempt they wait for `wait_s`, then they send `message()` to the router
with the index `router`, pass each response to `take`, and a failure to `failed`. An attempt that failed before the first
token is repeated; after it, the next attempt resumes after the tokens received, so that the caller sees every token once.
"""

import math
import random
import secrets
from dataclasses import dataclass, field

import grpc

from penstock.client import errors, messages, types
from penstock.client.retries import UNCHARGED_FAILURES, RetryBudget, RetryPolicy, is_retryable
from penstock.mapper import duration, read_time, write
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.types.events import Accepted, Finished
from penstock.types.replies import PositionLogprobs
from penstock.types.requests import Resume

MISSED_HEARTBEATS = 3  # a router counts as silent only after it has missed this many
SLO_WINDOW_TOKENS = 10  # the pace of an SLO is judged over this many tokens
MIN_REMAINDER_S = 0.001  # of a time to first token that has passed: zero is not valid
PROBE_TURNS = 16  # of a router that failed: so many turns without it before one request tries it
_ID_CHARACTERS = 120  # of a request id to which a number is appended; 128 are allowed


class Routers:
    """The state of a client's routers, shared by its requests. Routers are identified by their index in `target`.

    round_robin: new requests begin at the routers in turn; one that failed is left out, except for every PROBE_TURNS-th turn,
        until it has answered again.
    """

    def __init__(self, count: int, *, round_robin: bool = False) -> None:
        self.count, self._round_robin = count, round_robin
        self._turn = self._skipped = 0
        self._failed: set[int] = set()
        self.preferred = 0
        """The router that new requests try first."""
        self.heartbeat_s: list[float | None] = [None] * count
        """Longest time between two messages of a stream that each router announced; None: not announced."""

    def first(self) -> int:
        """The router at which a new request begins."""
        if not self._round_robin:
            return self.preferred
        for _ in range(self.count):
            router, self._turn = self._turn % self.count, self._turn + 1
            if router not in self._failed:
                return router
            self._skipped += 1
            if self._skipped % PROBE_TURNS == 0:
                return router
        return self.preferred

    def answered(self, router: int) -> None:
        """A router has answered: it gets requests again."""
        self._failed.discard(router)

    def in_order(self) -> list[int]:
        """All routers, the preferred one first."""
        return [(self.preferred + i) % self.count for i in range(self.count)]

    def failed(self, router: int) -> None:
        """Let new requests try the next router first."""
        self._failed.add(router)
        if self.preferred == router:
            self.preferred = (router + 1) % self.count

    def silence_s(self, router: int, silence_s: float) -> float | None:
        """Silence after which a stream of this router counts as broken; None without heartbeats."""
        heartbeat_s = self.heartbeat_s[router]
        return max(silence_s, MISSED_HEARTBEATS * heartbeat_s) if heartbeat_s is not None else None


@dataclass(slots=True)
class _Router:
    """Attempts of one request at one router."""

    attempts: int = 0
    failures: int = 0  # consecutive, without a token in between
    not_before_s: float = -math.inf


@dataclass(slots=True)
class ResumableRequest:
    """The state of one request. Times are of a monotonic clock, in seconds.

    deadline_s: No attempt starts at or after it.
    metadata: Metadata of the call of every attempt.
    """

    prompt: types.Prompt
    options: types.Options
    policy: RetryPolicy
    routers: Routers
    budget: RetryBudget
    deadline_s: float
    rng: random.Random = field(default_factory=random.Random)
    router: int = field(init=False)
    metadata: tuple[tuple[str, str], ...] = field(init=False)
    _request: pb.GenerateRequest = field(init=False)
    _tried: list[_Router] = field(init=False)
    _began_s: float | None = None
    _now_s: float = 0.0
    _attempts: int = 0
    _failures: int = 0  # consecutive, without a token in between
    _unavailable_since_s: float | None = None
    _send_at_s: float = -math.inf
    _last_failure: errors.PenstockError | None = None
    _answered: bool = False  # the current attempt has received more than heartbeats
    _request_id: str | None = None
    _accepted: Accepted | None = None
    _tier: str = ""
    _token_ids: list[int] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _logprobs: list[PositionLogprobs] = field(default_factory=list)
    _finished: Finished | None = None

    def __post_init__(self) -> None:
        self._request = messages.request_to_proto(self.prompt, self.options)
        self._request_id = self.options.request_id
        self.metadata = _sampled_trace() if self.options.trace else ()
        self.router = self.routers.first()
        self._tried = [_Router() for _ in range(self.routers.count)]

    @property
    def finished(self) -> bool:
        return self._finished is not None

    def wait_s(self, now: float) -> float:
        """Seconds to wait before the next attempt; 0: start it now.

        Raises:
            PenstockError: The last failure, if the deadline leaves no time for another attempt.
        """
        if self._began_s is None:
            self._began_s = now
        self._now_s = now
        failure = self._last_failure
        if failure is None:
            return 0.0
        if self._send_at_s <= now and self._failures > UNCHARGED_FAILURES and not self.budget.take(now):
            self._send_at_s = now + self.rng.uniform(0.5, 1.0) * self.policy.backoff_s(self._failures)
        if max(now, self._send_at_s) >= self.deadline_s:
            raise failure
        return max(0.0, self._send_at_s - now)

    def message(self) -> pb.GenerateRequest:
        """The request of the next attempt, to be sent to `router`."""
        self._attempts += 1
        self._answered = False
        router = self._tried[self.router]
        if self._request_id is not None:
            # A router that has seen the id may not have ended the broken attempt yet.
            retry_id = f"{self._request_id[:_ID_CHARACTERS]}-{self._attempts - 1}"
            self._request.request_id = retry_id if router.attempts else self._request_id
        router.attempts += 1
        if self._attempts > 1 and self._request.slo.HasField("time_to_first_token"):
            self._set_next_token_time()
        if self._token_ids:
            assert self._accepted is not None
            self._request.sampling.seed = self._accepted.seed
            self._request.resume.Clear()
            write(Resume(self._tier, tuple(self._token_ids)), self._request.resume)
            if self._request.prompt.chat.tool_use.tools:
                self._request.resume.text = "".join(self._text)
        return self._request

    def _set_next_token_time(self) -> None:
        """Give the next attempt what is left of the time to the first token, or one window of the pace after that token."""
        assert self._began_s is not None
        assert self.options.slo is not None
        slo = self._request.slo
        left_s = (self.options.slo.time_to_first_token_s or 0.0) - (self._now_s - self._began_s)
        if self._token_ids:
            if not slo.phases:
                slo.ClearField("time_to_first_token")
                return
            left_s = SLO_WINDOW_TOKENS * read_time(slo.phases[0].time_per_output_token)
        slo.time_to_first_token.CopyFrom(duration(max(MIN_REMAINDER_S, left_s)))

    def silence_s(self, silence_s: float) -> float | None:
        """Silence after which the current attempt has failed; None if its router has not announced heartbeats."""
        return self.routers.silence_s(self.router, silence_s)

    def take(self, response: pb.GenerateResponse) -> types.Event | None:
        """Process a response; return the event for the caller, None if there is none.

        Raises:
            UnavailableError: The router sent tokens that are not the next ones.
        """
        self._answered = self._answered or not response.HasField("heartbeat")
        heartbeat_s = messages.heartbeat_interval_s(response)
        if heartbeat_s is not None or response.HasField(
            "accepted"
        ):  # the router may have been replaced by an older version
            self.routers.heartbeat_s[self.router] = heartbeat_s
        if response.HasField("accepted"):
            self.routers.answered(self.router)
        event = messages.event_from_proto(response)
        match event:
            case Accepted():
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
            case Finished():
                self._finished = event
                self.budget.answered()
        self._unavailable_since_s = None
        return event

    def failed(self, failure: errors.PenstockError, now: float) -> None:
        """Handle the failure of the current attempt: choose router and time of the next one.

        Raises:
            PenstockError: `failure`, if another attempt cannot help or is not allowed. If the deadline passed before the
                attempt received an event, the refusal of the attempt before it.
        """
        refused_earlier = isinstance(self._last_failure, errors.OverloadedError)
        if isinstance(failure, errors.DeadlineError) and not self._answered and refused_earlier:
            assert self._last_failure is not None
            raise self._last_failure
        self._last_failure = failure
        if not is_retryable(failure) or self._attempts == self.policy.attempts:
            raise failure
        self._failures += 1
        self.routers.failed(self.router)
        self._check_unavailable(failure, now)
        router = self._tried[self.router]
        router.failures += 1
        hint_s = max(0.0, failure.retry_after_s) if isinstance(failure, errors.OverloadedError) else 0.0
        router.not_before_s = now + self.policy.pause_s(router.failures, hint_s, self.rng.random())
        if router.not_before_s >= self.deadline_s > now + hint_s:
            router.not_before_s = self.rng.uniform(now + hint_s, self.deadline_s)
        others = [(self.router + i) % self.routers.count for i in range(1, self.routers.count)]
        self.router = min((*others, self.router), key=lambda other: max(now, self._tried[other].not_before_s))
        # The streams of a router that died should not all arrive at once.
        spread_s = self.rng.random() * self.policy.initial_backoff_s
        self._send_at_s = max(self._tried[self.router].not_before_s, min(now + spread_s, self.deadline_s))

    def ended(self) -> None:
        """Handle the end of an attempt without an error.

        Raises:
            UnavailableError: The answer is not finished.
        """
        if self._finished is None:
            raise errors.UnavailableError("the router ended the stream early", code=grpc.StatusCode.UNAVAILABLE)

    def reply(self) -> types.Reply:
        """The complete answer. The request must be finished."""
        assert self._finished is not None
        assert self._accepted is not None
        finished = self._finished
        return types.Reply(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=finished.reason,
            tier=finished.tier,
            usage=finished.usage,
            tiers=finished.tiers,
            ttft_s=finished.ttft_s,
            total_s=finished.total_s,
            request_id=self._accepted.request_id,
            trace_id=finished.trace_id,
            tool_calls=finished.tool_calls,
            content="".join(self._text) if finished.content is None else finished.content,
            slo=finished.slo,
        )

    def _check_unavailable(self, failure: errors.PenstockError, now: float) -> None:
        """Raise `failure` if no router was available for `unavailable_timeout_s`."""
        if isinstance(failure, errors.OverloadedError):
            self._unavailable_since_s = None
            return
        if self._unavailable_since_s is None:
            self._unavailable_since_s = now
        limit_s = self.policy.unavailable_timeout_s
        if limit_s is not None and now - self._unavailable_since_s >= limit_s:
            raise failure


def _sampled_trace() -> tuple[tuple[str, str], ...]:
    """The context of a new trace, all attempts of a request being part of it (W3C Trace Context)."""
    return (("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"),)
