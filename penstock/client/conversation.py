"""One request as a client holds it: what to send, what has come, how to go on after a break. No I/O.

Both clients drive it the same way: send `request`, feed what comes to `take`, and on a broken call ask `after` whether,
when and with what to try again. A break before the first token is simply tried again; after it, the request asks for the
rest behind the tokens that have come, so the caller sees every token once.
"""

import random
from dataclasses import dataclass, field

import grpc

from penstock.client import errors, transport, types
from penstock.router.v1 import router_pb2 as pb


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """attempts: calls in all. Pauses double from first_pause_s to longest_pause_s, half of each drawn at random."""

    attempts: int = 5
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0

    def pause_s(self, failures: int, asked_s: float = 0.0) -> float:
        """Before the next call, after so many failed ones; at least what the server asked for."""
        longest = min(self.longest_pause_s, self.first_pause_s * 2.0 ** (failures - 1))
        return max(asked_s, longest * (0.5 + random.random() / 2))


@dataclass(slots=True)
class Conversation:
    """State of one request."""

    prompt: types.Prompt
    options: types.Options
    policy: RetryPolicy
    request: pb.GenerateRequest = field(init=False)
    failures: int = 0
    _accepted: types.Accepted | None = None
    _tier: str = ""
    _token_ids: list[int] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _logprobs: list[types.PositionLogprobs] = field(default_factory=list)
    _finished: types.Finished | None = None

    def __post_init__(self) -> None:
        self.request = transport.request_to_proto(self.prompt, self.options)

    def take(self, response: pb.GenerateResponse) -> types.Event | None:
        """Keep what came; the event to hand on, None if the caller has seen its like."""
        event = transport.event_from_proto(response)
        match event:
            case types.Accepted():
                seen, self._accepted = self._accepted is not None, self._accepted or event
                return None if seen else event
            case types.Tokens():
                self._tier = event.tier
                self._token_ids += event.token_ids
                self._text.append(event.text)
                self._logprobs += event.logprobs
            case types.Finished():
                self._finished = event
        return event

    def after(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next call of `request`; raises what cannot be mended by another."""
        failure = errors.from_rpc(error)
        self.failures += 1
        mendable = isinstance(failure, errors.UnavailableError | errors.OverloadedError)
        if not mendable or self.failures >= self.policy.attempts:
            raise failure from error
        if self._token_ids:
            assert self._accepted is not None
            self.request.sampling.seed = self._accepted.seed
            self.request.resume.CopyFrom(pb.Resume(tier=self._tier, token_ids=self._token_ids))
        if self.options.request_id is not None:  # the broken call may still be ending under the old id
            self.request.request_id = f"{self.options.request_id[:120]}-{self.failures}"
        asked_s = failure.retry_after_s if isinstance(failure, errors.OverloadedError) else 0.0
        return self.policy.pause_s(self.failures, asked_s)

    def ended(self) -> None:
        """The call has ended without an error; it must have finished the answer."""
        if self._finished is None:
            raise errors.UnavailableError("the router ended the stream early", code=grpc.StatusCode.UNAVAILABLE)

    def reply(self) -> types.Reply:
        """The whole answer; the conversation must be finished."""
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
        )

    @property
    def finished(self) -> bool:
        return self._finished is not None
