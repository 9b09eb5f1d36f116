"""What the failure of an attempt means for the instance, for the request's budget and for the client. No I/O.

`RULES` is the only table of it. An attempt is the time of a request at one instance. The caller classifies the error that
ended it (`classify`), records it (`FailureHistory.record`, `TryBudget.spend`) and carries out the consequences.
"""

import enum
from dataclasses import dataclass, field

from penstock.services.domain.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InstanceDraining,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    NotFound,
    NotServed,
    Overloaded,
    PenstockError,
    PromptTooLong,
    Unavailable,
)
from penstock.types.requests import PROGRESS_TOKENS

MAX_EJECTIONS = 2
"""Number of instances that the failures of one request may eject, over all its tiers."""
FAILURES_TO_EJECT = 3
"""Number of consecutive requests that must fail at an instance before it is ejected, if one failure proves little."""


class Failure(enum.Enum):
    """Why an attempt ended before the reply was complete."""

    CONNECT_FAILED = "connect_failed"
    """No connection, or it broke before the request was sent."""
    INSTANCE_DIED = "instance_died"
    """The connection broke while the request was running there."""
    INSTANCE_LEFT = "instance_left"
    """As INSTANCE_DIED, of an instance that was draining or had deregistered."""
    CALL_BROKEN = "call_broken"
    """The call shared by all replies ended with an error of the call itself; the instance is alive."""
    SILENT = "silent"
    PROTOCOL_ERROR = "protocol_error"
    """Tokens are missing or came twice. One such failure proves no fault: they may be lost with the source of a move."""
    ABORTED = "aborted"
    """The worker ended the reply, or handed it over to a target that is not read."""
    DRAINING = "draining"
    FULL = "full"
    DUPLICATE_ID = "duplicate_id"
    NOT_FOUND = "not_found"
    """An object that the request refers to, such as its transfer, does not exist."""
    INTERNAL = "internal"
    """An internal error of the worker while it worked on this request."""
    ENGINE_UNAVAILABLE = "engine_unavailable"
    """The worker answers, but its engine or engine server does not."""
    INVALID_REQUEST = "invalid_request"
    PROMPT_TOO_LONG = "prompt_too_long"
    MESSAGE_TOO_LARGE = "message_too_large"
    REQUEST_FAILED = "request_failed"
    NOT_SERVED = "not_served"
    DEADLINE_EXCEEDED = "deadline_exceeded"


class Ejection(enum.Enum):
    """Whether the instance is tried last for the time of the setting `ejection_s`."""

    NEVER = "never"
    REPEATED = "repeated"
    """After FAILURES_TO_EJECT consecutive requests."""
    BOUNDED = "bounded"
    """At once, but one request, which may be the cause, ejects at most MAX_EJECTIONS instances."""
    ALWAYS = "always"
    """At once: no request can cause it."""


class Cost(enum.Enum):
    """What the failure costs of the request's budget in this tier."""

    ATTEMPT = "attempt"
    """One of `max_attempts`: the instance was tried."""
    REFUSAL = "refusal"
    """One of `max_refusals`: the request was not started, or is not at fault."""
    END = "end"
    """The request ends: another instance would fail, too."""


@dataclass(frozen=True, slots=True)
class FailureRule:
    """One row.

    shown_to_client: a request that ends with this failure ends with the worker's own error; otherwise as unavailable.
    death: the instance may have died of the request, unless the reply got PROGRESS_TOKENS from it.
    """

    ejection: Ejection
    cost: Cost
    shown_to_client: bool = False
    death: bool = False


_ENDS = FailureRule(Ejection.NEVER, Cost.END, shown_to_client=True)

RULES: dict[Failure, FailureRule] = {
    Failure.CONNECT_FAILED: FailureRule(Ejection.ALWAYS, Cost.ATTEMPT),
    Failure.INSTANCE_DIED: FailureRule(Ejection.BOUNDED, Cost.ATTEMPT, death=True),
    Failure.INSTANCE_LEFT: FailureRule(Ejection.ALWAYS, Cost.ATTEMPT),
    Failure.CALL_BROKEN: FailureRule(Ejection.NEVER, Cost.REFUSAL),
    Failure.SILENT: FailureRule(Ejection.BOUNDED, Cost.ATTEMPT),
    Failure.PROTOCOL_ERROR: FailureRule(Ejection.REPEATED, Cost.ATTEMPT),
    Failure.ABORTED: FailureRule(Ejection.NEVER, Cost.ATTEMPT),
    Failure.DRAINING: FailureRule(Ejection.ALWAYS, Cost.REFUSAL),
    Failure.FULL: FailureRule(Ejection.NEVER, Cost.REFUSAL, shown_to_client=True),
    Failure.DUPLICATE_ID: FailureRule(Ejection.NEVER, Cost.ATTEMPT, shown_to_client=True),
    Failure.NOT_FOUND: FailureRule(Ejection.NEVER, Cost.ATTEMPT),
    Failure.INTERNAL: FailureRule(Ejection.REPEATED, Cost.ATTEMPT),
    Failure.ENGINE_UNAVAILABLE: FailureRule(Ejection.BOUNDED, Cost.ATTEMPT),
    Failure.INVALID_REQUEST: _ENDS,
    Failure.PROMPT_TOO_LONG: _ENDS,
    Failure.MESSAGE_TOO_LARGE: _ENDS,
    Failure.REQUEST_FAILED: _ENDS,
    Failure.NOT_SERVED: _ENDS,
    Failure.DEADLINE_EXCEEDED: _ENDS,
}

OF_THE_INSTANCE = frozenset({Failure.CONNECT_FAILED, Failure.INSTANCE_DIED, Failure.INSTANCE_LEFT, Failure.SILENT})
"""Failures that count for an instance even if the request runs on another one: of the source or target of a move."""


class InstanceFailed(Unavailable):
    """An attempt ended with a failure that the router itself detected."""

    def __init__(self, failure: Failure, message: str) -> None:
        self.failure = failure
        super().__init__(message)


# The first matching class counts, so subclasses come before their bases.
_BY_TYPE: tuple[tuple[type[PenstockError], Failure], ...] = (
    (PromptTooLong, Failure.PROMPT_TOO_LONG),
    (MessageTooLarge, Failure.MESSAGE_TOO_LARGE),
    (InvalidRequest, Failure.INVALID_REQUEST),
    (Overloaded, Failure.FULL),
    (AlreadyRunning, Failure.DUPLICATE_ID),
    (NotFound, Failure.NOT_FOUND),
    (InstanceDraining, Failure.DRAINING),
    (InternalError, Failure.INTERNAL),
    (Unavailable, Failure.ENGINE_UNAVAILABLE),
    (DeadlineExceeded, Failure.DEADLINE_EXCEEDED),
    (NotServed, Failure.NOT_SERVED),
)


def classify(error: PenstockError, *, leaving: bool = False) -> Failure:
    """The row of an error that ended an attempt. leaving: the instance was draining, or has left the mesh."""
    if isinstance(error, InstanceFailed):
        died = error.failure is Failure.INSTANCE_DIED
        return Failure.INSTANCE_LEFT if died and leaving else error.failure
    return next((failure for kind, failure in _BY_TYPE if isinstance(error, kind)), Failure.REQUEST_FAILED)


@dataclass(slots=True)
class FailureHistory:
    """The failures of one request, over all its tiers."""

    deaths: int = 0
    ejected: set[str] = field(default_factory=set)

    def is_poisonous(self, max_deaths: int) -> bool:
        """Whether the request is neither retried nor moved because too many instances died of it (query of death)."""
        return self.deaths >= max_deaths

    def record(self, failure: Failure, instance_id: str, new_tokens: int) -> Ejection:
        """Count a failure; return whether the instance is ejected for it: NEVER, REPEATED or ALWAYS.

        new_tokens: number of output tokens from this instance.
        """
        rule = RULES[failure]
        if rule.death and new_tokens < PROGRESS_TOKENS:
            self.deaths += 1
        if rule.ejection is not Ejection.BOUNDED:
            return rule.ejection
        if instance_id not in self.ejected and len(self.ejected) >= MAX_EJECTIONS:
            return Ejection.NEVER
        self.ejected.add(instance_id)
        return Ejection.ALWAYS


@dataclass(slots=True)
class TryBudget:
    """The remaining attempts and refusals of a request in one tier."""

    attempts: int
    refusals: int

    def spend(self, failure: Failure) -> bool:
        """Record a failure; return whether the request may be retried."""
        match RULES[failure].cost:
            case Cost.ATTEMPT:
                self.attempts -= 1
                return self.attempts > 0
            case Cost.REFUSAL:
                self.refusals -= 1
                return self.refusals > 0
            case Cost.END:
                return False
