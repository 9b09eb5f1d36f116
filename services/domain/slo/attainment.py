"""Whether a promise was kept. No I/O.

The pace is judged over every window of ten gaps between tokens, and over the whole of a shorter reply: token k attains it if

    t[k] - t[k - 10] <= sum of the paces promised for these ten gaps.

So one late token is forgiven where its neighbours were early, a stall is not, and a reply of speculative decoding, whose
tokens come several at a time, is judged as any other (the paper measures "every 10 tokens", section 6).
"""

import math
from dataclasses import dataclass

PACE_WINDOW_TOKENS = 10
TOLERANCE_S = 1e-6  # of sums of floating-point seconds


@dataclass(frozen=True, slots=True)
class Attainment:
    """How a reply compares with its promise.

    first_token_late_s: by how much the first token was late; 0 where it was in time, infinite where it never came.
    windows: how many windows were judged; late_windows: how many of them took too long.
    """

    first_token_late_s: float
    windows: int
    late_windows: int

    @property
    def attained(self) -> bool:
        """An SLO is attained only if every stage's is (section 3.2.1)."""
        return self.first_token_late_s <= 0 and self.late_windows == 0


class AttainmentTracker:
    """Judges a reply while it grows, in constant memory."""

    __slots__ = ("_allowed_s", "_count", "_first_due_s", "_first_late_s", "_late", "_lead", "_started", "_windows")

    def __init__(self, first_token_due_s: float | None) -> None:
        self._first_due_s = math.inf if first_token_due_s is None else first_token_due_s
        self._first_late_s = math.inf if first_token_due_s is not None else 0.0
        self._started = False
        self._allowed_s = 0.0  # what all gaps so far might have taken
        self._lead = [0.0] * PACE_WINDOW_TOKENS  # of the last tokens: their time less what was allowed until then
        self._count = self._windows = self._late = 0

    def token(self, at_s: float, tpot_s: float | None) -> None:
        """Count a token that came at `at_s`. tpot_s: the pace promised for it; None for none."""
        if not self._started:
            late_s = at_s - self._first_due_s
            self._started, self._first_late_s = True, late_s if late_s > TOLERANCE_S else 0.0
        elif tpot_s is None:  # nothing is promised here: windows start again
            self._count, self._allowed_s = 0, 0.0
        elif self._count:
            self._allowed_s += tpot_s
            if self._count >= PACE_WINDOW_TOKENS:
                self._windows += 1
                self._late += at_s - self._allowed_s - self._lead[self._count % PACE_WINDOW_TOKENS] > TOLERANCE_S
        self._lead[self._count % PACE_WINDOW_TOKENS] = at_s - self._allowed_s
        self._count += 1

    def next_due_s(self, tpot_s: float) -> float:
        """The latest time at which the next token still keeps its window; infinite before the first token of a pace."""
        if not self._count:
            return math.inf
        oldest = max(0, self._count - PACE_WINDOW_TOKENS) % PACE_WINDOW_TOKENS
        return self._lead[oldest] + self._allowed_s + tpot_s

    def result(self) -> Attainment:
        """The attainment of all tokens so far."""
        if self._windows == 0 and self._count > 1:  # shorter than a window: all of it is one
            late = self._lead[self._count - 1] - self._lead[0] > TOLERANCE_S
            return Attainment(self._first_late_s, 1, int(late))
        return Attainment(self._first_late_s, self._windows, self._late)
