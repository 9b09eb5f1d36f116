"""How long one engine step takes, as a function of what is in it. No I/O."""

import bisect
from dataclasses import dataclass

from services.domain.errors import invalid


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step computes.

    tokens: new tokens in all. context_tokens: cached and new tokens that the step's sequences attend to, summed over them.
    pairs: (new token, token attended to) pairs of prompt chunks; a decode's pairs are its context.
    longest_gap: sum over the decodes of how much longer the longest context is than their own.
    """

    tokens: int
    context_tokens: int
    pairs: float = 0.0
    longest_gap: int = 0


@dataclass(frozen=True, slots=True)
class StepLatencyModel:
    """T(step) = base(tokens) + context_token_s * context_tokens + pair_s * pairs + gap_s * longest_gap, in seconds.

    base is piecewise linear through (knot_tokens, knot_s): what every step pays for weights, arithmetic, communication and
    the CPU, measured or from a roofline. Beyond the last knot it goes on as between the last two. `context_token_s` is the
    reading of one cached token, `pair_s` the attention arithmetic of prompts, `gap_s` what sequences of unlike lengths cost
    when a step is as long as its longest (CascadeInfer, section 2.3).
    """

    knot_tokens: tuple[float, ...]
    knot_s: tuple[float, ...]
    context_token_s: float = 0.0
    pair_s: float = 0.0
    gap_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.knot_tokens) != len(self.knot_s) or len(self.knot_tokens) < 2:
            raise invalid("latency.knot_s", "as many as knot_tokens, and at least two")
        if any(b <= a for a, b in zip(self.knot_tokens, self.knot_tokens[1:], strict=False)):
            raise invalid("latency.knot_tokens", "must ascend")
        if min(*self.knot_s, self.context_token_s, self.pair_s, self.gap_s) < 0:
            raise invalid("latency", "seconds must not be negative")

    @classmethod
    def linear(cls, overhead_s: float, token_s: float, context_token_s: float) -> "StepLatencyModel":
        """base(tokens) = overhead_s + token_s * tokens."""
        return cls((0.0, 1.0), (overhead_s, overhead_s + token_s), context_token_s)

    def base_s(self, tokens: float) -> float:
        """The part that depends on the number of new tokens alone."""
        at = bisect.bisect_right(self.knot_tokens, tokens, 1, len(self.knot_tokens) - 1)
        x0, x1, y0, y1 = self.knot_tokens[at - 1], self.knot_tokens[at], self.knot_s[at - 1], self.knot_s[at]
        return max(0.0, y0 + (tokens - x0) * (y1 - y0) / (x1 - x0))

    def step_s(self, load: StepLoad) -> float:
        """Seconds that a step takes; 0 for an empty one."""
        if load.tokens == 0:
            return 0.0
        attention = self.context_token_s * load.context_tokens + self.pair_s * load.pairs
        return self.base_s(load.tokens) + attention + self.gap_s * load.longest_gap
