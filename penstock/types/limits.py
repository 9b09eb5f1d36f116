"""Limits that are part of a field's type."""

from dataclasses import dataclass

MAX_TIERS = 64
MAX_TOKENS = 2**31 - 1  # of one request: products of two counts stay within 64 bits


@dataclass(frozen=True, slots=True)
class AtMost:
    """Of a tuple in a message, checked before its values are created. what: the values, for the error."""

    count: int
    what: str
