"""Latency of an engine step as a function of its load. No I/O."""

import bisect
from dataclasses import dataclass

from services.domain.errors import invalid


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The load of one step.

    tokens: new tokens. context_tokens: cached and new tokens that the sequences attend to, summed over sequences.
    pairs: (new token, attended token) pairs of prompt chunks; for a decode, its context length.
    longest_gap: sum over decodes of the longest context minus their own.
    """

    tokens: int
    context_tokens: int
    pairs: float = 0.0
    longest_gap: int = 0


@dataclass(frozen=True, slots=True)
class StepLatencyModel:
    """T(step) = base(tokens) + context_token_s * context_tokens + pair_s * pairs + gap_s * longest_gap, in seconds.

    base is piecewise linear through (knot_tokens, knot_s): the time for weights, arithmetic, communication and the CPU,
    measured or from a roofline, extrapolated beyond the last knot. `context_token_s` is the time to read one cached token,
    `pair_s` the attention arithmetic of prompts per pair, `gap_s` the cost of different lengths in a batch whose step takes
    as long as its longest sequence (CascadeInfer, section 2.3).
    """

    knot_tokens: tuple[float, ...]
    knot_s: tuple[float, ...]
    context_token_s: float = 0.0
    pair_s: float = 0.0
    gap_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.knot_tokens) != len(self.knot_s) or len(self.knot_tokens) < 2:
            raise invalid("latency.knot_s", "must have the length of knot_tokens, at least 2")
        if any(b <= a for a, b in zip(self.knot_tokens, self.knot_tokens[1:], strict=False)):
            raise invalid("latency.knot_tokens", "must ascend")
        if min(*self.knot_s, self.context_token_s, self.pair_s, self.gap_s) < 0:
            raise invalid("latency", "seconds must not be negative")

    @classmethod
    def linear(cls, overhead_s: float, token_s: float, context_token_s: float) -> "StepLatencyModel":
        """base(tokens) = overhead_s + token_s * tokens."""
        return cls((0.0, 1.0), (overhead_s, overhead_s + token_s), context_token_s)

    def base_s(self, tokens: float) -> float:
        """The part that depends only on the number of new tokens."""
        at = bisect.bisect_right(self.knot_tokens, tokens, 1, len(self.knot_tokens) - 1)
        x0, x1, y0, y1 = self.knot_tokens[at - 1], self.knot_tokens[at], self.knot_s[at - 1], self.knot_s[at]
        return max(0.0, y0 + (tokens - x0) * (y1 - y0) / (x1 - x0))

    def step_s(self, load: StepLoad) -> float:
        """Duration of a step in seconds; 0 for an empty one."""
        if load.tokens == 0:
            return 0.0
        attention = self.context_token_s * load.context_tokens + self.pair_s * load.pairs
        return self.base_s(load.tokens) + attention + self.gap_s * load.longest_gap
