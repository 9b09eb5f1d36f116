"""What the compiled functions share: the columns of a request, the step model, the time of a step."""

import itertools
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.services.compilation import compiled
from penstock.services.domain.latency import SUM_TOLERANCE_S, StepLatencyModel
from penstock.services.domain.slo.attainment import PACE_WINDOW_TOKENS

F = npt.NDArray[np.float64]
N = npt.NDArray[np.int64]

# Rows of `counts`, (COUNTS, requests). A request's column is its place in the order of arrival.
# PLACED: 1 for those that have a place in the batch, and KV. LEFT: predicted output tokens to come. AGAIN: those predicted
# once a reply has had all of LEFT and continues; 0 where it ends then, as far as that is known.
KIND, DECODING, CONTEXT, PENDING, LEFT, PLACED, AGAIN = range(7)
COUNTS = 7
# Kinds. A finished request stays as GONE during a replay.
GONE, STANDARD, BEST_EFFORT = range(3)
# Rows of `times`, (TIMES, requests): when the next token is due; seconds per output token, KEPT_SHARE of those promised; the
# earliest begin of a step that computes the last token of the prompt.
DUE_S, TPOT_S, RELEASE_S = range(3)
TIMES = 3
UNLIMITED_PLACES = 1 << 30
EPSILON_S = SUM_TOLERANCE_S
INTERPOLATIONS = 6
"""Before halving: on a straight piece of the step times three are enough."""
SLACK_PACES = 0.5
"""How far a reply may be ahead of its pace for later use, in paces (`step.next_due_s`)."""
LATE_PACES = 0.3
"""By how much of the promised pace a step may end later than predicted, and no window is late. Predictions are a p95, and
best effort fills steps up to what they allow: one step in twenty would break every promise of its batch."""
KEPT_SHARE = (PACE_WINDOW_TOKENS - LATE_PACES) / (PACE_WINDOW_TOKENS + SLACK_PACES)
"""The share of the promised seconds per token that is kept on average: then no window is late, however slack is used."""


class Columns(NamedTuple):
    """Requests: counts (COUNTS, R) and times (TIMES, R), R at least as many as there are requests."""

    counts: N
    times: F


class Kv(NamedTuple):
    """tokens: KV for all promised requests together. partial_tokens: what the last block of each may hold more."""

    tokens: float
    partial_tokens: int


class Certificate(NamedTuple):
    """What a replay that passed has found. release_s (>= requests): when the step began that computed the last token of each
    prompt. most_held (1): the most KV tokens that the requests hold at any time; where a replay failed by KV, more than there
    are, and infinite where it failed by a prompt that had no place in time."""

    release_s: F
    most_held: F


class StepModel(NamedTuple):
    """StepLatencyModel for compiled code. rising: more tokens never take less time. reserve: share of a step's time that is
    best effort's where it has work. places: how many promised requests may run."""

    knot_tokens: F
    knot_s: F
    context_token_s: float
    pair_s: float
    gap_s: float
    max_step_tokens: int
    reserve: float
    rising: bool
    places: int


class Load(NamedTuple):
    """What a step computes, as StepLoad; `decodes` of it with their context and the longest of it."""

    tokens: int
    context: float
    pairs: float
    decodes: int
    decode_context: float
    longest: float


NO_LOAD = Load(0, 0.0, 0.0, 0, 0.0, 0.0)


class HasKnots(Protocol):
    """A StepModel, or the simulator's Engine."""

    @property
    def knot_tokens(self) -> F: ...

    @property
    def knot_s(self) -> F: ...


def step_model(
    latency: StepLatencyModel,
    max_step_tokens: int,
    reserve: float = 0.0,
    correction: float = 1.0,
    places: int = UNLIMITED_PLACES,
) -> StepModel:
    """The model of an engine's steps, all its seconds times `correction`."""
    latency = latency.by_tokens(places)
    return StepModel(
        np.array(latency.knot_tokens, np.float64),
        np.array(latency.knot_s, np.float64) * correction,
        latency.context_token_s * correction,
        latency.pair_s * correction,
        latency.gap_s * correction,
        max_step_tokens,
        reserve,
        all(after >= before for before, after in itertools.pairwise(latency.knot_s)),
        places,
    )


@compiled(allocates=False, error_model="numpy")
def base_s(tokens: float, model: HasKnots) -> float:
    """StepLatencyModel.base_s."""
    x, y = model.knot_tokens, model.knot_s
    at = 1
    while at < len(x) - 1 and x[at] <= tokens:
        at += 1
    return max(0.0, y[at - 1] + (tokens - x[at - 1]) * (y[at] - y[at - 1]) / (x[at] - x[at - 1]))


@compiled(error_model="numpy")
def step_s(load: Load, model: StepModel) -> float:
    """StepLatencyModel.step_s."""
    if load.tokens == 0:
        return 0.0
    gap = load.longest * load.decodes - load.decode_context
    attention = model.context_token_s * load.context + model.pair_s * load.pairs
    return base_s(load.tokens, model) + attention + model.gap_s * gap


@compiled(error_model="numpy")
def with_decode(load: Load, context: float) -> Load:
    """The step with one more decode, which has so many tokens of context."""
    ends, longest = context + 1.0, max(load.longest, context + 1.0)
    return Load(load.tokens + 1, load.context + ends, load.pairs, load.decodes + 1, load.decode_context + ends, longest)


@compiled(error_model="numpy")
def with_chunk(load: Load, start: int, tokens: int) -> Load:
    """The step with so many tokens of a prompt, from position `start` on."""
    context, pairs = load.context + (start + tokens), load.pairs + tokens * (start + 0.5 * (tokens + 1))
    return Load(load.tokens + tokens, context, pairs, load.decodes, load.decode_context, load.longest)


@compiled(error_model="numpy")
def tokens_within(seconds: float, most: int, start: int, load: Load, model: StepModel) -> int:
    """StepLatencyModel.tokens_within: tokens of a chunk from position `start` on that fit as well; -1 if not 0.

    Where more tokens never take less time, the first tries are at `most`, which mostly fits, and by interpolation.
    """
    none_s = step_s(load, model)
    if none_s > seconds + EPSILON_S:
        return -1
    low, high = 0, most
    if model.rising and most > 0:
        low_s, high_s = none_s, step_s(with_chunk(load, start, most), model)
        if high_s <= seconds + EPSILON_S:
            return most
        over, high = most, most - 1  # the smallest that is known not to fit
        for _ in range(INTERPOLATIONS):
            if low >= high:
                break
            share = (seconds - low_s) / (high_s - low_s)
            c = min(high, low + max(1, int(share * (over - low))))
            took_s = step_s(with_chunk(load, start, c), model)
            if took_s <= seconds + EPSILON_S:
                low, low_s = c, took_s
            else:
                over, high, high_s = c, c - 1, took_s
    while low < high:
        c = (low + high + 1) // 2
        if step_s(with_chunk(load, start, c), model) <= seconds + EPSILON_S:
            low = c
        else:
            high = c - 1
    return low


@compiled(allocates=False)
def predict_again(counts: N, i: int) -> None:
    """Reply i has outlived its prediction: the next one is that of replies as long as this one."""
    counts[LEFT, i] = max(1, counts[AGAIN, i])


@compiled(error_model="numpy")
def copied(columns: Columns, requests: int) -> Columns:
    """The first `requests` columns, as arrays of their own."""
    return Columns(columns.counts[:, :requests].copy(), columns.times[:, :requests].copy())
