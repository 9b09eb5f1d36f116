"""Problems of values, by field."""

from collections.abc import Iterator
from dataclasses import dataclass

MAX_ECHO_CHARS = 80
"""Largest length of quoted client input in an error message."""


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """The problem with one field, with its path as in the request (`sampling.temperature`, `messages[0].role`)."""

    field: str
    problem: str


def length_problems(text: str, most: int, path: str) -> Iterator[FieldProblem]:
    """The problem of a text with more characters than it may have."""
    if len(text) > most:
        yield FieldProblem(path, f"must have at most {most} characters, not {len(text)}")


def shortened(text: str, limit: int = MAX_ECHO_CHARS) -> str:
    """`text` truncated to `limit` characters with an ellipsis, with non-printable characters escaped."""
    head = text[:limit]
    if not head.isprintable():
        head = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in head)
    return head if len(head) <= limit and len(text) <= limit else f"{head[: limit - 1]}\u2026"
