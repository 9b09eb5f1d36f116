"""The one tree of errors. No I/O here: `services.errors` maps it to gRPC and HTTP."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """What is wrong with one field, named as the caller wrote it (`sampling.temperature`, `messages[0].role`)."""

    field: str
    problem: str


class PenstockError(Exception):
    """An error with a place in the contract. `reason` is its machine-readable name."""

    reason = "INTERNAL"


class InvalidRequest(PenstockError):
    """The request cannot be served as it is; every problem names its field."""

    reason = "INVALID_REQUEST"

    def __init__(self, *problems: FieldProblem) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{p.field}: {p.problem}" for p in problems))


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for a reply in this model's context; a larger context may do."""

    reason = "PROMPT_TOO_LONG"

    @classmethod
    def by(cls, field: str, tokens: int, context: int) -> "PromptTooLong":
        return cls(FieldProblem(field, f"{tokens} tokens leave no room for a reply in a context of {context}"))


class NotFound(PenstockError):
    reason = "NOT_FOUND"

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        super().__init__(f"no {kind} '{name}'")


class AlreadyRunning(PenstockError):
    reason = "ALREADY_RUNNING"

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request '{request_id}' is running already")


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


class DeadlineExceeded(PenstockError):
    reason = "DEADLINE_EXCEEDED"


class PeerNotReading(PenstockError):
    """The peer has not read for too long; what is written to it is given up. It may ask for the rest when it reads again."""

    reason = "PEER_NOT_READING"


class NotServed(PenstockError):
    """In the contract, but not served by this build or this engine."""

    reason = "NOT_SERVED"


def invalid(field: str, problem: str) -> InvalidRequest:
    """An InvalidRequest about one field."""
    return InvalidRequest(FieldProblem(field, problem))
