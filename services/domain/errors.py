"""The exceptions of all services. No I/O; `services.errors` maps them to gRPC and HTTP."""

import itertools
from collections.abc import Iterable, Mapping

from penstock.types.problems import FieldProblem, shortened

MAX_NAMED_PROBLEMS = 16
"""Largest number of problems in one error, which bounds its size."""
MAX_FIELD_CHARS = 120
MAX_PROBLEM_CHARS = 400
MAX_LISTED = 12
"""Largest number of names that an error lists for the one that is unknown."""


class PenstockError(Exception):
    """Base of the errors that clients see. `reason`: its machine-readable name."""

    reason = "INTERNAL"

    def __reduce__(self) -> "tuple[object, ...]":
        """As it was, for processes of a pool: most kinds are not made of their message alone."""
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[PenstockError], args: tuple[object, ...], values: dict[str, object]) -> PenstockError:
    error = kind.__new__(kind, *args)
    vars(error).update(values)
    return error


class InvalidRequest(PenstockError):
    """The request is invalid; every problem names its field.

    problems: at most MAX_NAMED_PROBLEMS, each bounded in length.
    """

    reason = "INVALID_REQUEST"

    def __init__(self, *problems: FieldProblem) -> None:
        self.problems = tuple(
            FieldProblem(shortened(p.field, MAX_FIELD_CHARS), shortened(p.problem, MAX_PROBLEM_CHARS))
            for p in problems[:MAX_NAMED_PROBLEMS]
        )
        unnamed = max(0, len(problems) - MAX_NAMED_PROBLEMS)
        message = "; ".join(f"{p.field}: {p.problem}" for p in self.problems)
        super().__init__(f"{message}; and {unnamed} more" if unnamed else message)


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for a reply in the model's context. A model with a larger context may serve it."""

    reason = "PROMPT_TOO_LONG"

    @classmethod
    def by(cls, field: str, tokens: int, context: int) -> "PromptTooLong":
        return cls(FieldProblem(field, f"{tokens} tokens leave no room for a reply in a context of {context}"))


class UnsupportedByModel(InvalidRequest):
    """This tier's model or engine cannot take the request as it is; another tier's may."""

    reason = "UNSUPPORTED_BY_MODEL"


class NotFound(PenstockError):
    reason = "NOT_FOUND"

    def __init__(self, kind: str, name: str, known: Iterable[str] = ()) -> None:
        """known: the names that there are, as far as the caller may know them."""
        self.kind = kind
        listed = ", ".join(itertools.islice(known, MAX_LISTED))
        super().__init__(f"no {kind} '{shortened(name)}'" + (f": there are {listed}" if listed else ""))


class AlreadyRunning(PenstockError):
    reason = "ALREADY_RUNNING"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request '{shortened(request_id)}' is already running")


class RevisionConflict(PenstockError):
    reason = "REVISION_CONFLICT"

    def __init__(self, expected: int, current: int) -> None:
        super().__init__(f"expected revision {expected}, but the current one is {current}")


class Overloaded(PenstockError):
    """There is no capacity now. `retry_after_s`: when to try again."""

    reason = "OVERLOADED"

    def __init__(self, problem: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{problem}; try again in {retry_after_s:.1f} s")


class RateLimited(Overloaded):
    """A tenant has used up a limit. `headers` has the limits, by the names of OpenAI's headers."""

    reason = "RATE_LIMIT_EXCEEDED"

    def __init__(self, problem: str, retry_after_s: float, headers: Mapping[str, str] | None = None) -> None:
        self.headers = dict(headers or {})
        super().__init__(problem, retry_after_s)


class Unauthenticated(PenstockError):
    """The caller has not proved who it is: an API key is missing, wrong, expired or revoked."""

    reason = "INVALID_API_KEY"


class PermissionDenied(PenstockError):
    """The caller is known and may not do this."""

    reason = "PERMISSION_DENIED"


class SloDeclined(PenstockError):
    """The SLO of the request cannot be kept, and the request was not to be served as best effort."""

    reason = "SLO_DECLINED"

    def __init__(self) -> None:
        super().__init__(
            "no worker can keep the latency objectives, and the request is not to be served as best effort"
        )


class Unavailable(PenstockError):
    """A service that the request needs is unavailable at the moment."""

    reason = "UNAVAILABLE"


class InstanceDraining(Unavailable):
    """The instance is draining and accepts no new requests."""

    reason = "DRAINING"


class InternalError(Unavailable):
    """Another service failed while processing the request; see its log."""

    reason = "INTERNAL_ERROR"


class MessageTooLarge(InvalidRequest):
    """The request, or a part of its reply, exceeds the size limit of a message."""

    reason = "MESSAGE_TOO_LARGE"

    @classmethod
    def by(cls, field: str, size_bytes: int, limit_bytes: int) -> "MessageTooLarge":
        return cls(FieldProblem(field, f"makes a message of {size_bytes} bytes; the limit is {limit_bytes}"))


class PoisonRequest(PenstockError):
    """Several instances died while running this request. It is given up and must not be retried."""

    reason = "POISON_REQUEST"

    def __init__(self, deaths: int) -> None:
        super().__init__(f"{deaths} instances died while running this request; it is not retried")


class DeadlineExceeded(PenstockError):
    reason = "DEADLINE_EXCEEDED"


class RequestFailed(PenstockError):
    """The engine cannot compute this request. Other requests are not affected.

    It fails in the same way on every instance of the model and must not be retried.
    """

    reason = "REQUEST_FAILED"


class PeerNotReading(PenstockError):
    """The peer has not read for too long, so the stream to it ends. It may resume when it reads again."""

    reason = "PEER_NOT_READING"


class NotServed(PenstockError):
    """This build, this engine or this mesh does not serve the call."""

    reason = "NOT_SERVED"


def check(*problems: Iterable[FieldProblem]) -> None:
    """Check that there are no problems.

    Raises:
        InvalidRequest: There are some; the error names them.
    """
    if every := [*itertools.chain(*problems)]:
        raise InvalidRequest(*every)


def invalid(field: str, problem: str) -> InvalidRequest:
    """An InvalidRequest about one field."""
    return InvalidRequest(FieldProblem(field, problem))


def unsupported(field: str, problem: str) -> UnsupportedByModel:
    """An UnsupportedByModel about one field."""
    return UnsupportedByModel(FieldProblem(field, problem))
