"""Problems of values, by field."""

from dataclasses import dataclass

MAX_ECHO_CHARS = 80
"""Largest length of quoted client input in an error message."""


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """The problem with one field, with its path as in the request (`sampling.temperature`, `messages[0].role`)."""

    field: str
    problem: str


def shortened(text: str, limit: int = MAX_ECHO_CHARS) -> str:
    """`text` truncated to `limit` characters with an ellipsis, with non-printable characters escaped."""
    head = text[:limit]
    if not head.isprintable():
        head = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in head)
    return head if len(head) <= limit and len(text) <= limit else f"{head[: limit - 1]}\u2026"
