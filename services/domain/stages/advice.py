"""A worker's advice that one of its requests should move to another instance. No I/O."""

import enum
from dataclasses import dataclass


class MoveReason(enum.Enum):
    """Why a request should move."""

    RANGE_CROSSED = "range_crossed"
    OVERLOADED = "overloaded"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class MoveAdvice:
    """One request should move.

    tokens: its length, prompt and output so far. sender_tokens: total length of the requests that should leave the instance.
    """

    reason: MoveReason
    tokens: int
    sender_tokens: int
