"""What the failure of an attempt means for the instance, for the request's budget and for the client. No I/O.

`Failure` is the only table of it. An attempt is the time of a request at one instance. The caller classifies the error that
ended it (`classify`), records it (`FailureHistory.record`, `TryBudget.spend`) and carries out the consequences.
"""

import enum
from dataclasses import dataclass, field

from penstock.services.domain import errors
from penstock.services.domain.errors import PenstockError
from penstock.types.requests import PROGRESS_TOKENS

MAX_EJECTIONS = 2
"""Number of instances that the failures of one request may eject, over all its tiers."""
FAILURES_TO_EJECT = 3
"""Number of consecutive requests that must fail at an instance before it is ejected, if one failure proves little."""


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
    """What follows from a failure.

    shown: a request that ends with this failure ends with the worker's own error; otherwise as unavailable.
    death: the instance may have died of the request, unless the reply got PROGRESS_TOKENS from it.
    """

    ejection: Ejection
    cost: Cost
    shown: bool = False
    death: bool = False


_ENDS = FailureRule(Ejection.NEVER, Cost.END, shown=True)


class Failure(enum.Enum):
    """Why an attempt ended before the reply was complete: the rule for it, and the worker's error that says so, if one does.

    Of an error's classes the first one counts, so subclasses come before their bases.
    """

    _value_: str
    rule: FailureRule
    error: type[PenstockError] | None

    def __new__(cls, value: str, rule: FailureRule, error: type[PenstockError] | None = None) -> "Failure":
        failure = object.__new__(cls)
        failure._value_, failure.rule, failure.error = value, rule, error
        return failure

    CONNECT_FAILED = "connect_failed", FailureRule(Ejection.ALWAYS, Cost.ATTEMPT)
    """No connection, or it broke before the request was sent."""
    INSTANCE_DIED = "instance_died", FailureRule(Ejection.BOUNDED, Cost.ATTEMPT, death=True)
    """The connection broke while the request was running there."""
    INSTANCE_LEFT = "instance_left", FailureRule(Ejection.ALWAYS, Cost.ATTEMPT)
    """As INSTANCE_DIED, of an instance that was draining or had deregistered."""
    CALL_BROKEN = "call_broken", FailureRule(Ejection.NEVER, Cost.REFUSAL)
    """The call shared by all replies ended with an error of the call itself; the instance is alive."""
    SILENT = "silent", FailureRule(Ejection.BOUNDED, Cost.ATTEMPT)
    PROTOCOL_ERROR = "protocol_error", FailureRule(Ejection.REPEATED, Cost.ATTEMPT)
    """Tokens are missing or came twice. One such failure proves no fault: they may be lost with the source of a move."""
    ABORTED = "aborted", FailureRule(Ejection.NEVER, Cost.ATTEMPT)
    """The worker ended the reply, or handed it over to a target that is not read."""
    DRAINING = "draining", FailureRule(Ejection.ALWAYS, Cost.REFUSAL), errors.InstanceDraining
    FULL = "full", FailureRule(Ejection.NEVER, Cost.REFUSAL, shown=True), errors.Overloaded
    DUPLICATE_ID = "duplicate_id", FailureRule(Ejection.NEVER, Cost.ATTEMPT, shown=True), errors.AlreadyRunning
    NOT_FOUND = "not_found", FailureRule(Ejection.NEVER, Cost.ATTEMPT), errors.NotFound
    """An object that the request refers to, such as its transfer, does not exist."""
    INTERNAL = "internal", FailureRule(Ejection.REPEATED, Cost.ATTEMPT), errors.InternalError
    """An internal error of the worker while it worked on this request."""
    ENGINE_UNAVAILABLE = "engine_unavailable", FailureRule(Ejection.BOUNDED, Cost.ATTEMPT), errors.Unavailable
    """The worker answers, but its engine or engine server does not."""
    PROMPT_TOO_LONG = "prompt_too_long", _ENDS, errors.PromptTooLong
    MESSAGE_TOO_LARGE = "message_too_large", _ENDS, errors.MessageTooLarge
    INVALID_REQUEST = "invalid_request", _ENDS, errors.InvalidRequest
    NOT_SERVED = "not_served", _ENDS, errors.NotServed
    DEADLINE_EXCEEDED = "deadline_exceeded", _ENDS, errors.DeadlineExceeded
    REQUEST_FAILED = "request_failed", _ENDS, PenstockError
    """Any other error."""


OF_THE_INSTANCE = frozenset({Failure.CONNECT_FAILED, Failure.INSTANCE_DIED, Failure.INSTANCE_LEFT, Failure.SILENT})
"""Failures that count for an instance even if the request runs on another one: of the source or target of a move."""


class InstanceFailed(errors.Unavailable):
    """An attempt ended with a failure that the router itself detected."""

    def __init__(self, failure: Failure, message: str) -> None:
        self.failure = failure
        super().__init__(message)


def classify(error: PenstockError, *, leaving: bool = False) -> Failure:
    """The failure that an error means which ended an attempt. leaving: the instance was draining, or has left the mesh."""
    if isinstance(error, InstanceFailed):
        died = error.failure is Failure.INSTANCE_DIED
        return Failure.INSTANCE_LEFT if died and leaving else error.failure
    return next(failure for failure in Failure if failure.error is not None and isinstance(error, failure.error))


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
        rule = failure.rule
        if rule.death and new_tokens < PROGRESS_TOKENS:
            self.deaths += 1
        if rule.ejection is not Ejection.BOUNDED:
            return rule.ejection
        if instance_id not in self.ejected and len(self.ejected) >= MAX_EJECTIONS:
            return Ejection.NEVER
        self.ejected.add(instance_id)
        return Ejection.ALWAYS


class TryBudget:
    """The remaining attempts and refusals of a request in one tier."""

    def __init__(self, attempts: int, refusals: int) -> None:
        self._left = {Cost.ATTEMPT: attempts, Cost.REFUSAL: refusals, Cost.END: 0}

    def spend(self, failure: Failure) -> bool:
        """Record a failure; return whether the request may be retried."""
        cost = failure.rule.cost
        self._left[cost] -= 1
        return self._left[cost] > 0
