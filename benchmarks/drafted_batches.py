"""A batch with drafts in virtual time: what the worker's own choice brings against the best that enumeration finds."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.simulator.speculation import MAX_WINDOW, SimulatedDrafter, known_models
from penstock.planner_service.simulator.workload import Floats, Ints
from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.speculation.choice import ChainCandidate, Chooser, Estimate, best, predicted, windows
from penstock.services.domain.speculation.estimates import Acceptance

KNOWN_TOKENS = 8
"""Tokens that a drafter computes along with its next draft; more are computed first, as a prompt."""


@dataclass(frozen=True, slots=True)
class BatchSpeculation:
    """A batch in virtual time. Tokens per second: without drafts, of the best candidate by enumeration, and as chosen at run
    time. best: that candidate; None where the target alone is the best."""

    replies: int
    alone_tokens_per_s: float
    best_tokens_per_s: float
    best: ChainCandidate | None
    chosen_tokens_per_s: float


def simulated(
    target: StepLatencyModel,
    drafters: Sequence[SimulatedDrafter],
    replies: int,
    *,
    context_tokens: int,
    steps: int,
    seed: int = 0,
    max_window: int = MAX_WINDOW,
) -> BatchSpeculation:
    """A batch of endless replies that starts without knowing how much is accepted, as a worker does, and learns it.

    What is learned is drawn; the tokens of a step are those expected of what was chosen, so that the result is about the
    choices and not about the draws. Exploring, and what a chain has to compute when it is chosen, cost their time.
    steps: so many to learn in, and as many that count.
    """
    cost, truth = known_models(target, drafters, replies, context_tokens, max_window)
    candidate, best_per_s = best(replies, cost, truth, windows(max_window))
    alone_per_s = predicted(replies, cost, truth, None).tokens_per_s
    _, learned = known_models(target, drafters, replies, context_tokens, max_window)
    learned = [Estimate(Acceptance(max_window), estimate.cost, estimate.passes) for estimate in learned]
    chooser, rng = Chooser(cost, learned, max_window), np.random.default_rng(seed)
    tokens = seconds = 0.0
    missing = np.full(len(drafters), float(context_tokens))  # tokens of each reply that a model has not computed
    tried = missing.copy()  # the same of the one reply that chains are tried with
    for step in range(2 * steps):
        if step == steps:
            tokens = seconds = 0.0
        chosen = chooser.choose(replies, functools.partial(_prompt_tokens, missing, replies))
        if chosen is not None:
            for m in chosen.chain:
                seconds += truth[m].cost.catch_up_s(_prompt_tokens(missing, replies, m))
                missing[m] = tried[m] = 0.0
        _learn(chosen, replies, chooser.models, drafters, rng)
        expected = predicted(replies, cost, truth, chosen)
        missing += expected.tokens / replies
        tried += expected.tokens / replies
        tokens, seconds = tokens + expected.tokens, seconds + expected.seconds
        explored = chooser.explore(replies, functools.partial(_tokens_of, tried))
        if explored is not None:  # by one reply, in the same pass; what is accepted of its draft is left out
            _learn(explored, 1, chooser.models, drafters, rng)
            rows = replies + explored.window + len(explored.chain) - 1
            seconds += predicted(1, cost, truth, explored).drafted_s
            seconds += max(0.0, cost.seconds(replies, rows) - cost.seconds(replies, replies))
            seconds += sum(truth[m].cost.catch_up_s(int(tried[m])) for m in explored.chain)
            tried[list(explored.chain)] = 0.0
    return BatchSpeculation(replies, alone_per_s, best_per_s, candidate, tokens / seconds)


def _tokens_of(missing: Floats, models: Sequence[int]) -> list[int]:
    return [int(missing[m]) for m in models]


def _prompt_tokens(missing: Floats, replies: int, model: int) -> int:
    """What a model computes before it drafts for all replies."""
    return replies * int(missing[model]) if missing[model] > KNOWN_TOKENS else 0


def _learn(
    candidate: ChainCandidate | None,
    replies: int,
    models: Sequence[Estimate],
    drafters: Sequence[SimulatedDrafter],
    rng: np.random.Generator,
) -> None:
    """Draw what is accepted in a step, and have the estimates observe it."""
    if candidate is None:
        return
    lengths = np.full(replies, candidate.window)
    for lower, upper in itertools.pairwise(candidate.chain):
        accepted = _accepted(lengths, drafters[lower].acceptance, rng)
        _observe(models[lower].accepted_by(upper), lengths, accepted, replies)
        lengths = accepted + 1
    last = candidate.last
    _observe(models[last].acceptance, lengths, _accepted(lengths, drafters[last].acceptance, rng), replies)


def _accepted(lengths: Ints, share: float, rng: np.random.Generator) -> Ints:
    """(B) how many tokens of drafts of these lengths are accepted, each with this probability if those before it do."""
    stands = rng.random((len(lengths), int(lengths.max()))) < share
    counts = np.cumprod(stands, axis=1).sum(axis=1)
    return np.asarray(np.minimum(counts, lengths), np.int64)


def _observe(
    acceptance: Acceptance,
    lengths: Ints,
    accepted: Ints,
    replies: int,
) -> None:
    for length, count in zip(lengths.tolist(), accepted.tolist(), strict=True):
        acceptance.observe(length, length, count, replies)


def last_paying_batch(batches: Sequence[BatchSpeculation], gain: float = 1.0) -> int:
    """The largest batch up to which drafting pays: it and all smaller ones have more than `gain` times the tokens per second;
    0 if the smallest has not. batches: in ascending order."""
    paying = itertools.takewhile(lambda b: b.best_tokens_per_s > gain * b.alone_tokens_per_s, batches)
    return max((batch.replies for batch in paying), default=0)
