"""Speculative decoding in virtual time: what drafts bring a replica at each batch size. No I/O.

The choice is the worker's own: `services.domain.speculation.choice` chooses the chain and the window, from the latency models
of the target and the drafters, and from the shares of drafted tokens that are accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.speculation.choice import ChainCandidate, Estimate, best, predicted, windows
from penstock.services.domain.speculation.estimates import Acceptance, DraftCost, PassCost

MAX_WINDOW = 7
"""The default of `tiers[].speculation.max_window`."""
CATCH_UP_TOKENS = 512
"""Tokens of a prompt in one pass of a drafter: by these its price per token is known."""


@dataclass(frozen=True, slots=True)
class SimulatedDrafter:
    """A model that drafts. latency: of its steps. acceptance: the probability that the target draws its token, and a larger
    drafter as well."""

    latency: StepLatencyModel
    acceptance: float


def known_models(
    target: StepLatencyModel,
    drafters: Sequence[SimulatedDrafter],
    replies: int,
    context_tokens: int,
    max_window: int = MAX_WINDOW,
) -> tuple[PassCost, list[Estimate]]:
    """What an engine knows after a while of passes and drafts at this batch size.

    drafters: small to large. context_tokens: of each reply.
    """
    estimates = []
    for at, drafter in enumerate(drafters):
        alone_s, all_s = (drafter.latency.step_s(StepLoad(n, n * context_tokens)) for n in (1, replies))
        token_s = (all_s - alone_s) / max(1, replies - 1)
        prompt = StepLoad(CATCH_UP_TOKENS, CATCH_UP_TOKENS, 0.5 * CATCH_UP_TOKENS * (CATCH_UP_TOKENS + 1))
        cost = DraftCost(
            fixed_s=0.0,
            reply_s=0.0,
            step_s=alone_s - token_s,
            token_s=token_s,
            catch_up_token_s=drafter.latency.step_s(prompt) / CATCH_UP_TOKENS,
        )
        passes = _passes(drafter.latency, replies, context_tokens, max_window) if at else None
        estimate = Estimate(Acceptance.known(drafter.acceptance, max_window), cost, passes)
        larger = range(at + 1, len(drafters))
        estimate.by.update({i: Acceptance.known(drafter.acceptance, max_window) for i in larger})
        estimates.append(estimate)
    return _passes(target, replies, context_tokens, max_window), estimates


def _passes(latency: StepLatencyModel, replies: int, context_tokens: int, max_window: int) -> PassCost:
    widths = range(1, max_window + 2)
    return PassCost(
        {
            (n, w): latency.step_s(StepLoad(n * w, n * (context_tokens + w), requests=n))
            for n in {1, replies}
            for w in widths
        }
    )


@dataclass(frozen=True, slots=True)
class ChosenDrafts:
    """The best candidate for a batch; None where the target alone is the best.

    tokens: that the replies get by one pass of it. tokens_per_s: of the batch.
    """

    replies: int
    candidate: ChainCandidate | None
    tokens: float
    tokens_per_s: float


def chosen_drafts(
    target: StepLatencyModel,
    drafters: Sequence[SimulatedDrafter],
    *,
    context_tokens: int,
    max_running: int,
    max_window: int = MAX_WINDOW,
) -> list[ChosenDrafts]:
    """The worker's own choice for batches of 1, 2, 4, ... and `max_running` replies, each with so many tokens."""
    result = []
    for replies in [2**i for i in range(max_running.bit_length()) if 2**i < max_running] + [max_running]:
        cost, models = known_models(target, drafters, replies, context_tokens, max_window)
        candidate, per_s = best(replies, cost, models, windows(max_window))
        result.append(ChosenDrafts(replies, candidate, predicted(replies, cost, models, candidate).tokens, per_s))
    return result


def speculating_latency(
    target: StepLatencyModel,
    drafters: Sequence[SimulatedDrafter],
    *,
    context_tokens: int,
    max_running: int,
    max_window: int = MAX_WINDOW,
) -> StepLatencyModel:
    """The step times of a replica with drafts, as a planner's simulation counts them: per token of each reply.

    A step of n decodes takes the time of a pass with the best candidate's drafts, divided by the tokens that each reply gets
    by it. So a simulation that gives each decode a token per step sees their mean pace. Steps of more tokens than can decode
    at once are prompts and keep their times; the chunk of a prompt that is shorter than that is priced as decodes, which is
    too little by what drafts gain at that batch size. Reading a cached token is priced as in the largest batch.

    context_tokens: of each reply, for the choice; at this length, times are exact unless a larger batch would be faster.
    """
    if not drafters:
        return target
    chosen = chosen_drafts(
        target, drafters, context_tokens=context_tokens, max_running=max_running, max_window=max_window
    )
    totals_s = {choice.replies: choice.replies / choice.tokens_per_s for choice in chosen}
    passes_per_token = chosen[-1].replies / chosen[-1].tokens
    context_token_s = target.context_token_s * passes_per_token  # of the largest batch, in which contexts weigh most
    knots, least_s = dict[float, float](), 0.0
    for replies, total_s in totals_s.items():  # a step never gets faster by one more token
        least_s = knots[float(replies)] = max(least_s, total_s - context_token_s * replies * (context_tokens + 1))
    plain = target.by_tokens(max_running)
    knots |= {x: y for x, y in zip(plain.knot_tokens, plain.knot_s, strict=True) if x > max_running}
    if len(knots) < 2 or max(knots) <= max_running:  # prompts continue as without drafts
        for tokens in (max_running + 1.0, 2.0 * max_running + 1):
            knots[tokens] = plain.base_s(tokens)
    xs = tuple(sorted(knots))
    return StepLatencyModel(xs, tuple(knots[x] for x in xs), context_token_s, target.pair_s, target.gap_s)
