"""Latency of an engine step as a function of its load. No I/O."""

import bisect
from dataclasses import dataclass, replace

from penstock.services.domain.errors import invalid


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The load of one step.

    tokens: new tokens. context_tokens: cached and new tokens that the sequences attend to, summed over sequences.
    pairs: (new token, attended token) pairs of prompt chunks; for a decode, its context length.
    longest_gap: sum over decodes of the longest context minus their own.
    speculative_steps: steps of the draft model before the step, i.e. the longest speculation among the decodes.
    requests: that compute in the step; prompts: of these, those that start in it. Only `EngineCpu` counts them.
    """

    tokens: int
    context_tokens: int
    pairs: float = 0.0
    longest_gap: int = 0
    speculative_steps: int = 0
    requests: float = 0
    prompts: float = 0


NOTHING = StepLoad(0, 0)
SUM_TOLERANCE_S = 1e-9
"""Sums of floating-point seconds that should be equal differ by less: a step that ends just when a token is due is in
time."""


@dataclass(frozen=True, slots=True)
class EngineCpu:
    """What a step costs an engine's CPU: step_s + request_s * requests + prompt_s * prompts, in seconds.

    overlapped: the CPU prepares a step while the GPU computes the one before, so that a step takes as long as the slower of
    the two (NanoFlow; SGLang, newer vLLM); else one waits for the other.
    """

    step_s: float = 0.0
    request_s: float = 0.0
    prompt_s: float = 0.0
    overlapped: bool = False

    def seconds(self, requests: float, prompts: float = 0) -> float:
        return self.step_s + self.request_s * requests + self.prompt_s * prompts

    def step_with(self, gpu_s: float, requests: float, prompts: float = 0) -> float:
        """Seconds of a step that the GPU computes in gpu_s."""
        cpu_s = self.seconds(requests, prompts)
        return max(gpu_s, cpu_s) if self.overlapped else gpu_s + cpu_s

    def scaled(self, factor: float) -> "EngineCpu":
        """All seconds times a factor."""
        return replace(
            self, step_s=factor * self.step_s, request_s=factor * self.request_s, prompt_s=factor * self.prompt_s
        )


NO_CPU = EngineCpu()


@dataclass(frozen=True, slots=True)
class StepLatencyModel:
    """T(step) = base(tokens) + context_token_s * context_tokens + pair_s * pairs + gap_s * longest_gap
    + draft_step_s * speculative_steps, in seconds, and the engine's CPU.

    base is piecewise linear through (knot_tokens, knot_s): the time for weights, arithmetic and communication, from a
    roofline or measured (then with the CPU), extrapolated beyond the last knot. `context_token_s` is the time to read one
    cached token, `pair_s` the attention arithmetic of prompts per pair, `gap_s` the cost of different lengths in a batch
    whose step takes as long as its longest sequence (CascadeInfer, section 2.3), `draft_step_s` the time of a step of the
    draft model (SLOs-Serve, section 3.1.1; its text counts the longest *prefill* there, which we read as a slip). `cpu`: of
    the engine, where base is without it.
    """

    knot_tokens: tuple[float, ...]
    knot_s: tuple[float, ...]
    context_token_s: float = 0.0
    pair_s: float = 0.0
    gap_s: float = 0.0
    draft_step_s: float = 0.0
    cpu: EngineCpu = NO_CPU

    def __post_init__(self) -> None:
        if len(self.knot_tokens) != len(self.knot_s) or len(self.knot_tokens) < 2:
            raise invalid("latency.knot_s", "must have the length of knot_tokens, at least 2")
        if any(b <= a for a, b in zip(self.knot_tokens, self.knot_tokens[1:], strict=False)):
            raise invalid("latency.knot_tokens", "must ascend")
        cpu = (self.cpu.step_s, self.cpu.request_s, self.cpu.prompt_s)
        if min(*self.knot_s, self.context_token_s, self.pair_s, self.gap_s, self.draft_step_s, *cpu) < 0:
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
        gap_s = self.gap_s * load.longest_gap
        gpu_s = self.base_s(load.tokens) + attention + gap_s + self.draft_step_s * load.speculative_steps
        return self.cpu.step_with(gpu_s, load.requests, load.prompts)

    def scaled(self, factor: float) -> "StepLatencyModel":
        """All seconds times a factor."""
        return StepLatencyModel(
            self.knot_tokens,
            tuple(seconds * factor for seconds in self.knot_s),
            self.context_token_s * factor,
            self.pair_s * factor,
            self.gap_s * factor,
            self.draft_step_s * factor,
            self.cpu.scaled(factor),
        )

    def by_tokens(self, max_running: int) -> "StepLatencyModel":
        """The same for callers that do not count requests: the CPU is in base, as if each token were of a request of its own,
        up to max_running. So only steps in which many prompts start take longer than it says."""
        if self.cpu == NO_CPU:
            return self
        knots = sorted({*self.knot_tokens, float(max_running)})
        base_s = tuple(self.cpu.step_with(self.base_s(tokens), min(tokens, max_running)) for tokens in knots)
        return replace(self, knot_tokens=tuple(knots), knot_s=base_s, cpu=NO_CPU)

    def tokens_within(self, seconds: float, most: int, included: StepLoad = NOTHING, start: int = 0) -> int:
        """The inverse: how many tokens of one prompt chunk, from position `start` on, fit in a step of so many seconds.

        most: no more than this. included: what the step computes already. The step with the result never takes longer than
        `seconds`; -1 where even `included` alone does. Where base(tokens) never falls, it is the greatest such number.
        """

        def took_s(count: int) -> float:
            load = replace(
                included,
                tokens=included.tokens + count,
                context_tokens=included.context_tokens + (start + count if count else 0),
                pairs=included.pairs + count * (start + 0.5 * (count + 1)),
            )
            return self.step_s(load)

        limit_s = seconds + SUM_TOLERANCE_S
        return -1 if took_s(0) > limit_s else bisect.bisect_right(range(1, most + 1), limit_s, key=took_s)
