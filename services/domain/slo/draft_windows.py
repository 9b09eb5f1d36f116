"""How many tokens may be drafted for requests under SLOs, by pace. No I/O.

Two things limit a window. While prompts wait, the lengths of `speculation_lengths` do: those that leave most of a step for
prompts. And a step may take no longer than the promises allow, drafts included, which the caller checks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.slo.attainment import PACE_WINDOW_TOKENS
from penstock.services.domain.slo.speculation import MAX_LENGTH, SpeculationTier, speculation_lengths

TIGHTEST_SHARE = 0.5
"""A pace is tightened to no less than this share of it: a request that is far too late must not take all that others have."""


@dataclass(frozen=True, slots=True)
class DraftPace:
    """What drafts are worth now. acceptance: the probability that a drafted token is accepted if those before it are.

    step_s: seconds of drafting one more token for each reply.
    """

    acceptance: float
    step_s: float


FIRST_PACE = DraftPace(0.8, 0.0)
"""Of drafts that come with requests, of which nothing is to be computed: about what they are worth in the shipped family."""


def tightened_pace(tpot_s: float, late_s: float) -> float:
    """The pace of a request whose next token will come `late_s` after its deadline, at most 0 if in time: it makes up for it
    within the tokens over which a pace is judged."""
    return max(TIGHTEST_SHARE * tpot_s, tpot_s - max(0.0, late_s) / PACE_WINDOW_TOKENS)


def longest_windows(
    paces: Sequence[float],
    pace: DraftPace,
    latency: StepLatencyModel,
    *,
    context_tokens: int,
    max_step_tokens: int,
    max_window: int,
    prompts_wait: bool,
) -> list[int]:
    """The most tokens that may be drafted for each request in the next step.

    paces: of the requests that decode, see `tightened_pace`. latency: without drafts, as far as it is corrected.
    context_tokens: of all decodes. prompts_wait: whether the step or the next ones have prompts to compute; where they have
    none, nothing but the promises limits a window.
    """
    if not paces or not prompts_wait:
        return [max_window] * len(paces)
    tiers = sorted(set(paces))
    requested = [SpeculationTier(paces.count(tpot_s), tpot_s, pace.acceptance) for tpot_s in tiers]
    with_drafts = replace(latency, draft_step_s=pace.step_s)
    plan = speculation_lengths(
        requested,
        with_drafts,
        context_tokens=context_tokens,
        max_step_tokens=max_step_tokens,
        max_length=min(MAX_LENGTH, max_window + 1),
    )
    if plan is None:  # no lengths keep the paces: prompts get what can be had
        return [0] * len(paces)
    lengths = dict(zip(tiers, plan.lengths, strict=True))
    return [lengths[tpot_s] - 1 for tpot_s in paces]
