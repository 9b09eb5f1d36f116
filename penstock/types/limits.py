"""Limits that are part of a field's type."""

from dataclasses import dataclass

MAX_TIERS = 64
MAX_TOKENS = 2**31 - 1  # of one request: products of two counts stay within 64 bits


@dataclass(frozen=True, slots=True)
class AtMost:
    """Of a tuple or a mapping. In a message, it is checked before the values are created. what: the values, for the error."""

    count: int
    what: str

    def problem(self, count: int) -> str:
        """What is wrong with so many."""
        return f"at most {self.count} {self.what}, not {count}"
