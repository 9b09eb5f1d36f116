"""The one tree of errors. No I/O here: `services.errors` maps it to gRPC and HTTP."""

from dataclasses import dataclass

MAX_NAMED_PROBLEMS = 16
"""Problems that one report names; a client mends these first, and a report stays small whatever was sent."""
MAX_FIELD_CHARS = 120
MAX_PROBLEM_CHARS = 400
MAX_ECHO_CHARS = 80
"""Of a client's own text in a message: enough to recognise it."""


def shortened(text: str, limit: int = MAX_ECHO_CHARS) -> str:
    """`text` in at most `limit` printable characters: the rest becomes an ellipsis, and line ends and the like escapes."""
    head = text[:limit]
    if not head.isprintable():
        head = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in head)
    return head if len(head) <= limit and len(text) <= limit else f"{head[: limit - 1]}\u2026"


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """What is wrong with one field, named as the caller wrote it (`sampling.temperature`, `messages[0].role`)."""

    field: str
    problem: str


class PenstockError(Exception):
    """An error with a place in the contract. `reason` is its machine-readable name."""

    reason = "INTERNAL"


class InvalidRequest(PenstockError):
    """The request cannot be served as it is; every problem names its field.

    problems: at most MAX_NAMED_PROBLEMS, each bounded in length.
    unnamed: how many more there were.
    """

    reason = "INVALID_REQUEST"

    def __init__(self, *problems: FieldProblem) -> None:
        self.problems = tuple(
            FieldProblem(shortened(p.field, MAX_FIELD_CHARS), shortened(p.problem, MAX_PROBLEM_CHARS))
            for p in problems[:MAX_NAMED_PROBLEMS]
        )
        self.unnamed = max(0, len(problems) - MAX_NAMED_PROBLEMS)
        message = "; ".join(f"{p.field}: {p.problem}" for p in self.problems)
        super().__init__(f"{message}; and {self.unnamed} more" if self.unnamed else message)


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for a reply in this model's context; a larger context may do."""

    reason = "PROMPT_TOO_LONG"

    @classmethod
    def by(cls, field: str, tokens: int, context: int) -> "PromptTooLong":
        return cls(FieldProblem(field, f"{tokens} tokens leave no room for a reply in a context of {context}"))


class UnsupportedByModel(InvalidRequest):
    """This tier's model or engine cannot take the request as it is; another tier's may."""

    reason = "UNSUPPORTED_BY_MODEL"


class NotFound(PenstockError):
    reason = "NOT_FOUND"

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        super().__init__(f"no {kind} '{shortened(name)}'")


class AlreadyRunning(PenstockError):
    reason = "ALREADY_RUNNING"

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request '{shortened(request_id)}' is running already")


class RevisionConflict(PenstockError):
    reason = "REVISION_CONFLICT"

    def __init__(self, expected: int, current: int) -> None:
        self.expected, self.current = expected, current
        super().__init__(f"expected revision {expected}, but the current one is {current}")


class Overloaded(PenstockError):
    """Too much is waiting already; `retry_after_s` is when a place may be free."""

    reason = "OVERLOADED"

    def __init__(self, what: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{what}; try again in {retry_after_s:.1f} s")


class Unavailable(PenstockError):
    """Something that the request needs is away; it may come back."""

    reason = "UNAVAILABLE"


class InstanceDraining(Unavailable):
    """This instance takes no new requests: it is about to end."""

    reason = "DRAINING"


class InternalError(Unavailable):
    """Another service failed while it worked on the request; its log has more."""

    reason = "INTERNAL_ERROR"


class MessageTooLarge(InvalidRequest):
    """The request, or a part of its reply, is larger than one message may be."""

    reason = "MESSAGE_TOO_LARGE"

    @classmethod
    def by(cls, field: str, size_bytes: int, limit_bytes: int) -> "MessageTooLarge":
        return cls(FieldProblem(field, f"makes a message of {size_bytes} bytes; at most {limit_bytes} can be sent"))


class PoisonRequest(PenstockError):
    """Instances died while they worked on this request; it is not tried at another, and must not be sent again."""

    reason = "POISON_REQUEST"

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths
        super().__init__(f"{deaths} instances died while they worked on this request; it is not tried at another")


class DeadlineExceeded(PenstockError):
    reason = "DEADLINE_EXCEEDED"


class RequestFailed(PenstockError):
    """An engine cannot compute this one request; others are not affected.

    The same request fails the same way at any instance of the model: it must not be retried.
    """

    reason = "REQUEST_FAILED"


class PeerNotReading(PenstockError):
    """The peer has not read for too long; what is written to it is given up. It may ask for the rest when it reads again."""

    reason = "PEER_NOT_READING"


class NotServed(PenstockError):
    """In the contract, but not served by this build or this engine."""

    reason = "NOT_SERVED"


def invalid(field: str, problem: str) -> InvalidRequest:
    """An InvalidRequest about one field."""
    return InvalidRequest(FieldProblem(field, problem))
