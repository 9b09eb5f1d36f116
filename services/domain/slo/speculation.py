"""How many tokens to verify per step and pace, so that most is left for prompts (section 3.2.3, appendix D). No I/O.

Tier l has n_l decoding requests that are promised a token every tpot_l seconds. With sl_l tokens verified per step, of which
the last is the model's own (sl = 1 is plain decoding), a step brings Acc(sl_l) tokens on average, so steps may take

    T(sl) = min over l of tpot_l * Acc(sl_l),    Acc(sl) = 1 + a + ... + a^(sl-1) = (1 - a^sl) / (1 - a)

and the lengths are those for which the prefill throughput is greatest:

    (tokens that fit in T(sl) in addition to max_l sl_l - 1 draft steps - sum over l of n_l sl_l) / T(sl).

Given T, the best length of a tier is the least that keeps its pace: more only takes tokens from prompts and adds draft steps.
T is always some tpot_l * Acc(k). So it is enough to try L * max_length values of T, and for each the least lengths: the
optimum over all max_length^L combinations, as a test shows by trying them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.services.domain.latency import SUM_TOLERANCE_S, StepLatencyModel, StepLoad

MAX_LENGTH = 10
"""The paper's bound (appendix D): "below 10"."""


@dataclass(frozen=True, slots=True)
class SpeculationTier:
    """Requests that decode at one pace: how many, seconds per token, and the chance that a draft token is accepted."""

    requests: int
    tpot_s: float
    acceptance: float


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """lengths: verified tokens per step and tier. prefill_tokens_per_s: what is left for prompts."""

    lengths: tuple[int, ...]
    prefill_tokens_per_s: float


def expected_tokens(length: int, acceptance: float) -> float:
    """Acc(sl): mean tokens per step with `length` verified tokens."""
    return float(length) if acceptance >= 1 else (1 - acceptance**length) / (1 - acceptance)


def speculation_lengths(
    tiers: Sequence[SpeculationTier],
    latency: StepLatencyModel,
    *,
    context_tokens: int = 0,
    max_step_tokens: int,
    max_length: int = MAX_LENGTH,
) -> SpeculationPlan | None:
    """The lengths of greatest prefill throughput; of equals the shortest. None where no lengths keep every pace.

    tiers: at least one. context_tokens: of all decoding requests together.
    """
    choices = [[tier.tpot_s * expected_tokens(k, tier.acceptance) for k in range(1, max_length + 1)] for tier in tiers]
    best: SpeculationPlan | None = None
    for step_s in sorted({seconds for row in choices for seconds in row}):
        lengths = [next((k for k, s in enumerate(row, 1) if s >= step_s), 0) for row in choices]
        if 0 in lengths:
            break
        plan = plan_of(lengths, tiers, latency, context_tokens, max_step_tokens)
        if plan is not None and (
            best is None or plan.prefill_tokens_per_s > best.prefill_tokens_per_s + SUM_TOLERANCE_S
        ):
            best = plan
    return best


def plan_of(
    lengths: Sequence[int],
    tiers: Sequence[SpeculationTier],
    latency: StepLatencyModel,
    context_tokens: int,
    max_step_tokens: int,
) -> SpeculationPlan | None:
    """What these lengths give; None where a step with the decodes alone takes longer than the paces allow."""
    step_s = min(tier.tpot_s * expected_tokens(k, tier.acceptance) for k, tier in zip(lengths, tiers, strict=True))
    decodes = sum(tier.requests * k for k, tier in zip(lengths, tiers, strict=True))
    if decodes > max_step_tokens:
        return None
    load = StepLoad(decodes, context_tokens, speculative_steps=max(lengths) - 1)
    left = latency.tokens_within(step_s, max_step_tokens - decodes, load)
    return None if left < 0 else SpeculationPlan(tuple(lengths), left / step_s)
