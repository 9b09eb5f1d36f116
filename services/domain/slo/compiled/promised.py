"""What a step computes for requests under a promise: parts 1 to 3 of `step`, on columns without gaps. No I/O.

Steps that are served and those that a certificate repeats are formed by this one function. One decision repeats hundreds of
them, so columns hold only what decodes or waits, and what is the same for every step is summed up once.

Numbers are divided as numpy does (`error_model`): a check for zero at every division costs more than the division, and keeps
loops from taking several columns at once. Divisors are paces and distances of knots, which are never zero.
"""

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from services.domain.slo.compiled.layout import (
    CONTEXT,
    DECODING,
    DUE_S,
    EPSILON_S,
    KIND,
    LEFT,
    PENDING,
    RELEASE_S,
    STANDARD,
    TPOT_S,
    F,
    N,
    StepModel,
    base_s,
    step_s,
    tokens_within,
)

# Whether best effort has work in a step.
NONE, PRESENT, ASSUMED = range(3)
HALVINGS, FEW = 12, 8  # of the range in which a due time is sought, and of how many it is then selected
ANY_ORDER = {"nnan", "nsz", "reassoc"}
"""Lets loops take several columns at once: no time is NaN, and sums of whole numbers are the same in any order."""


class Decodes(NamedTuple):
    """Requests that decode, (D) each, by arrival.

    column: of the request. context: tokens whose KV is there. left: tokens to come. granted: has a token in this step.
    """

    column: N
    due_s: F
    tpot_s: F
    context: F
    left: F
    granted: npt.NDArray[np.bool_]


class Prompts(NamedTuple):
    """Requests whose prompts are to be computed, (P) each, earliest deadline first. granted: tokens in this step."""

    column: N
    due_s: F
    tpot_s: F
    release_s: F
    context: N
    pending: N
    left: N
    granted: N


class Sums(NamedTuple):
    """Over all decodes: how many, the tightest pace, tokens per second that their paces ask for, context and the longest of
    it, each with one more token."""

    requests: int
    tightest_s: float
    demand_per_s: float
    context: float
    longest: float


class Load(NamedTuple):
    """What a step computes, as StepLoad; `decodes` of it with their context and the longest of it. earliest_s: when the
    first token of a decode is due. cap_s: how long the step may take, infinite without limit."""

    tokens: int
    context: float
    pairs: float
    decodes: int
    decode_context: float
    longest: float
    earliest_s: float
    cap_s: float


@numba.njit(cache=True, nogil=True, error_model="numpy")
def load_s(load: Load, model: StepModel) -> float:
    """Seconds that the step takes; 0 for an empty one."""
    gap = load.longest * load.decodes - load.decode_context
    return float(step_s(load.tokens, load.context, load.pairs, gap, model))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def new_decodes(most: int) -> Decodes:
    return Decodes(
        np.empty(most, np.int64),
        np.empty(most),
        np.empty(most),
        np.empty(most),
        np.empty(most),
        np.empty(most, np.bool_),
    )


@numba.njit(cache=True, nogil=True, error_model="numpy")
def promised_decodes(counts: N, times: F, requests: int, decodes: Decodes) -> Sums:
    """Fill `decodes` with the promised requests that decode; what they add up to."""
    n = 0
    for i in range(requests):
        if counts[KIND, i] == STANDARD and counts[DECODING, i] == 1:
            decodes.column[n] = i
            decodes.due_s[n], decodes.tpot_s[n] = times[DUE_S, i], times[TPOT_S, i]
            decodes.context[n], decodes.left[n] = counts[CONTEXT, i], counts[LEFT, i]
            n += 1
    return sums_of(decodes, n)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def sums_of(decodes: Decodes, count: int) -> Sums:
    tightest_s, demand_per_s, context, longest = np.inf, 0.0, 0.0, 0.0
    for k in range(count):
        tightest_s = min(tightest_s, decodes.tpot_s[k])
        demand_per_s += 1.0 / decodes.tpot_s[k]
        context += decodes.context[k] + 1.0
        longest = max(longest, decodes.context[k] + 1.0)
    return Sums(count, tightest_s, demand_per_s, context, longest)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def promised_prompts(counts: N, times: F, order: N, prompts: int) -> Prompts:
    """The prompts of `order`, its first `prompts` columns, in that order."""
    columns = order[:prompts].copy()
    due_s, tpot_s, release_s = np.empty(prompts), np.empty(prompts), np.empty(prompts)
    context, pending = np.empty(prompts, np.int64), np.empty(prompts, np.int64)
    left, granted = np.empty(prompts, np.int64), np.zeros(prompts, np.int64)
    for p in range(prompts):
        i = columns[p]
        due_s[p], tpot_s[p], release_s[p] = times[DUE_S, i], times[TPOT_S, i], times[RELEASE_S, i]
        context[p], pending[p], left[p] = counts[CONTEXT, i], counts[PENDING, i], counts[LEFT, i]
    return Prompts(columns, due_s, tpot_s, release_s, context, pending, left, granted)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def kth_smallest(values: F, k: int) -> float:
    """The element that sorting would put at index `k`; changes the order of `values`.

    Hoare's selection (1961, Algorithm 65: FIND). numba's `np.partition` does the same, but takes seconds to compile.
    """
    low, high = 0, len(values) - 1
    while low < high:
        pivot, i, j = values[(low + high) // 2], low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if k <= j:
            high = j
        elif k >= i:
            low = i
        else:
            break
    return float(values[k])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def kth_earliest(due_s: F, count: int, k: int, earliest_s: float) -> float:
    """The due time that sorting would put at index `k` of the first `count`, of which `earliest_s` is the first.

    Counting is much cheaper than moving: halve the range of times until few are left in it, and select among those.
    """
    low_s, high_s, below, up_to = earliest_s, _latest(due_s, count), 0, count
    if low_s == high_s:
        return low_s
    low_s = -np.inf  # not in the range itself
    middle_s = 0.5 * (earliest_s + high_s)
    for _ in range(HALVINGS):
        if up_to - below <= FEW or not np.isfinite(middle_s):
            break
        at_most = _due_by(due_s, count, middle_s)
        if at_most > k:
            high_s, up_to = middle_s, at_most
        else:
            low_s, below = middle_s, at_most
        middle_s = 0.5 * (max(low_s, earliest_s) + high_s)
    some, n = np.empty(up_to - below), 0
    for i in range(count):
        if low_s < due_s[i] <= high_s:
            some[n] = due_s[i]
            n += 1
    return kth_smallest(some, k - below)


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=ANY_ORDER)
def _latest(due_s: F, count: int) -> float:
    latest_s = -np.inf
    for k in range(count):
        latest_s = due_s[k] if due_s[k] > latest_s else latest_s
    return latest_s


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _due_by(due_s: F, count: int, at_s: float) -> int:
    due = 0
    for k in range(count):
        due += due_s[k] <= at_s
    return due


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=ANY_ORDER)
def _earliest(due_s: F, count: int, now_s: float, within_s: float) -> tuple[float, int]:
    """The earliest of them, and how many are due within so many seconds."""
    earliest_s, urgent = np.inf, 0
    for k in range(count):
        at_s = due_s[k]
        earliest_s = at_s if at_s < earliest_s else earliest_s
        urgent += at_s - now_s < within_s
    return earliest_s, urgent


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _take_earliest(decodes: Decodes, count: int, quota: int, earliest_s: float) -> tuple[float, float]:
    """Grant a token to the `quota` decodes that are due first, ties by arrival; their context and the longest of it."""
    last_s = kth_earliest(decodes.due_s, count, quota - 1, earliest_s)
    taken = _take_due(decodes.due_s, decodes.granted, count, last_s)
    k = count - 1
    while taken > quota:  # the last to come of those that are due together wait
        if decodes.due_s[k] == last_s:
            decodes.granted[k] = False
            taken -= 1
        k -= 1
    return _granted_context(decodes.context, decodes.granted, count)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _take_due(due_s: F, granted: npt.NDArray[np.bool_], count: int, last_s: float) -> int:
    taken = 0
    for k in range(count):
        granted[k] = due_s[k] <= last_s
        taken += due_s[k] <= last_s
    return taken


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=ANY_ORDER)
def _granted_context(context: F, granted: npt.NDArray[np.bool_], count: int) -> tuple[float, float]:
    total, longest = 0.0, 0.0
    for k in range(count):
        ends = context[k] + 1.0 if granted[k] else 0.0
        total += ends
        longest = ends if ends > longest else longest
    return total, longest


@numba.njit(cache=True, nogil=True, error_model="numpy")
def form_promised(
    now_s: float,
    decodes: Decodes,
    sums: Sums,
    prompts: Prompts,
    waiting: int,  # prompts
    model: StepModel,
    best_effort: int,  # NONE, PRESENT, or ASSUMED by a certificate
    hold: bool,  # prompts complete as late as they can, whatever their release times
) -> Load:
    """Decide which promised tokens the step has that begins now: parts 1 to 3."""
    earliest_s, urgent = np.inf, 0
    longest_step_s = min(sums.tightest_s, base_s(model.max_step_tokens, model))
    cannot_wait_s = 2.0 * longest_step_s - EPSILON_S
    room = model.max_step_tokens
    decode_context, longest, taken = 0.0, 0.0, 0

    # 1. decodes
    if sums.requests > 0:
        earliest_s, urgent = _earliest(decodes.due_s, sums.requests, now_s, cannot_wait_s)
    limit_s = earliest_s - now_s
    if sums.requests > 0:
        quota = int(np.ceil(sums.demand_per_s * max(0.0, min(limit_s, longest_step_s)) - EPSILON_S))
        quota = min(max(quota, urgent), sums.requests, room)
        taken = quota
        if quota == sums.requests:
            decode_context, longest = sums.context, sums.longest
            decodes.granted[: sums.requests] = True
        elif quota > 0:
            decode_context, longest = _take_earliest(decodes, sums.requests, quota, earliest_s)
    tokens, context, pairs = taken, decode_context, 0.0
    gap = longest * taken - decode_context
    cap_s = limit_s
    if taken > 0 and waiting > 0:
        later_s = _alone_first_s(now_s, sums, prompts, taken, decode_context, gap, limit_s, model)
        if later_s < np.inf:
            tokens, taken, longest = 0, 0, 0.0
            context, decode_context, gap = 0.0, 0.0, 0.0
            cap_s = limit_s - later_s
    if taken == 0:
        decodes.granted[: sums.requests] = False

    # 2. prompts
    prompts.granted[:waiting] = 0
    for p in range(waiting):
        if tokens >= room:
            break
        slack_s = prompts.due_s[p] - now_s
        free_to_end = slack_s < cannot_wait_s or (not hold and now_s >= prompts.release_s[p] - EPSILON_S)
        allowed = prompts.pending[p] - (0 if free_to_end else 1)
        if allowed <= 0:
            continue
        reserved = best_effort == ASSUMED or (best_effort == PRESENT and slack_s >= cannot_wait_s)
        within_s = cap_s * (1.0 - model.reserve) if reserved and cap_s < np.inf else cap_s
        start = prompts.context[p]
        c = tokens_within(within_s, min(allowed, room - tokens), start, tokens, context, pairs, gap, model)
        if c <= 0:
            break
        prompts.granted[p] = c
        tokens += c
        context += start + c
        pairs += c * (start + 0.5 * (c + 1))
        if c == prompts.pending[p]:  # its first token comes at the end of this step
            cap_s = min(cap_s, max(slack_s, step_s(tokens, context, pairs, gap, model)))

    # nothing but last tokens that wait: do not stand idle
    if tokens == 0 and waiting > 0:
        c = min(prompts.pending[0], room)
        prompts.granted[0] = c
        start = prompts.context[0]
        tokens, context, pairs = c, float(start + c), c * (start + 0.5 * (c + 1))
        cap_s = max(prompts.due_s[0] - now_s, step_s(tokens, context, pairs, gap, model))

    for p in range(waiting):
        if prompts.granted[p] < prompts.pending[p]:  # a prompt that goes on must not be held up by what fills the step
            cap_s = min(cap_s, max(longest_step_s, step_s(tokens, context, pairs, gap, model)))
            break

    # 3. decodes that could have waited
    if taken < sums.requests:
        for k in range(sums.requests):
            if tokens >= room:
                break
            if decodes.granted[k]:
                continue
            ends = decodes.context[k] + 1.0
            wider = max(longest, ends) * (taken + 1) - (decode_context + ends)
            if step_s(tokens + 1, context + ends, pairs, wider, model) > cap_s + EPSILON_S:
                break
            decodes.granted[k] = True
            taken += 1
            tokens += 1
            context += ends
            decode_context += ends
            longest = max(longest, ends)
    return Load(tokens, context, pairs, taken, decode_context, longest, earliest_s, cap_s)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _alone_first_s(
    now_s: float,
    sums: Sums,
    prompts: Prompts,
    taken: int,  # decodes that this step would have
    decode_context: float,  # of those
    gap: float,  # of those
    limit_s: float,
    model: StepModel,
) -> float:
    """Seconds of a step with all decodes, where the first prompt goes before it alone; infinite where it does not.

    It does where it would be late in a step with the decodes and is not without them, and they can all wait for the step
    behind it: the short prompt of a request whose first token is due within little more than a step.
    """
    slack_s = prompts.due_s[0] - now_s
    count, start = prompts.pending[0], prompts.context[0]
    pairs = count * (start + 0.5 * (count + 1))
    together = step_s(taken + count, decode_context + start + count, pairs, gap, model)
    if together <= slack_s + EPSILON_S or count > model.max_step_tokens:
        return np.inf
    alone = step_s(count, float(start + count), pairs, 0.0, model)
    if alone > slack_s + EPSILON_S:
        return np.inf
    later: float = step_s(sums.requests, sums.context, 0.0, sums.longest * sums.requests - sums.context, model)
    fits = sums.requests <= model.max_step_tokens and alone + later <= limit_s + EPSILON_S
    return later if fits else np.inf
