"""Holds tokens of a reply back for a short time, so that one delivery, and one message, has several. No I/O."""

import math
from dataclasses import dataclass

from penstock.types.replies import TokenFrame
from penstock.types.requests import PROGRESS_TOKENS

MAX_INTERVAL_S = 1.0
"""Limit on the time that tokens are held, regardless of the caller's: they are lost if the worker dies."""
MAX_FRAME_TOKENS = 512
"""Frame size of a reply whose tokens may be held longer; its second frame has at most PROGRESS_TOKENS."""


@dataclass(frozen=True, slots=True)
class OutputCoalescing:
    """Tokens of a reply are held until this many are there, or this much time (plus a step) has passed."""

    seconds: float
    tokens: int


class HeldTokens:
    """The tokens of one reply that wait. The first ones do not. Times are of one monotonic clock."""

    __slots__ = ("_frames", "_seconds", "_sent_s", "_then_tokens", "_tokens")

    def __init__(self, usual: OutputCoalescing, interval_s: float | None = None) -> None:
        """interval_s: how long tokens may be held, if longer than usual."""
        longer = interval_s is not None and interval_s > usual.seconds
        self._seconds = min(interval_s or 0.0, MAX_INTERVAL_S) if longer else usual.seconds
        self._tokens = PROGRESS_TOKENS if longer else usual.tokens
        self._then_tokens = MAX_FRAME_TOKENS if longer else usual.tokens
        self._frames: list[TokenFrame] = []
        self._sent_s = -math.inf

    def add(self, frame: TokenFrame) -> None:
        self._frames.append(frame)

    def due(self, now_s: float) -> bool:
        """Whether there are tokens that must not wait any longer."""
        if not self._frames:
            return False
        count = self._frames[-1].end - self._frames[0].offset
        return now_s - self._sent_s >= self._seconds or count >= self._tokens

    def take(self, now_s: float) -> TokenFrame | None:
        """Hand out what is held as one frame; None if nothing is."""
        if not self._frames:
            return None
        if self._sent_s > -math.inf:
            self._tokens = self._then_tokens
        frames, self._frames, self._sent_s = self._frames, [], now_s
        return TokenFrame.joined(frames)
