"""The certificate of an admission: the step policy itself, repeated in virtual time until nothing can go wrong. No I/O."""

import numba
import numpy as np
import numpy.typing as npt

from services.domain.slo.compiled.layout import EPSILON_S, SLACK_PACES, F, N, StepModel, step_s
from services.domain.slo.compiled.promised import (
    ANY_ORDER,
    ASSUMED,
    NONE,
    Decodes,
    Prompts,
    Sums,
    form_promised,
    load_s,
    new_decodes,
    promised_decodes,
    promised_prompts,
    sums_of,
)
from services.domain.slo.compiled.step import next_due_s, prompts_by_deadline

MAX_STEPS = 20_000
"""A replay gives up, and the admission is refused, after so many steps: at 20 steps a second a quarter of an hour."""


@numba.njit(cache=True, nogil=True, error_model="numpy")
def keeps_promises(
    now_s: float,
    counts: N,  # (COUNTS, requests)
    times: F,  # (TIMES, requests)
    requests: int,
    model: StepModel,
    best_effort: bool,
    hold: bool,
    release_s: F,  # (>= requests) out: when the step began that computed the last prompt token
    kv_tokens: float,  # of all these requests at any time
    partial_tokens: int,  # that a request's last KV block may hold besides its own
    peak: F,  # (1) out: the most KV tokens that they hold at any time, where they pass; more than kv_tokens where KV fails
) -> bool:
    """Whether no standard request misses a deadline, from now to its last token (LEFT), and their KV fits all the time.

    best_effort: requests without a promise may use what time is left over in a step, so that decodes do not get ahead.

    A request holds the KV of its tokens so far until its last one. A prompt that is not complete counts as a whole, since the
    progress of prompts depends on best effort. A request that was promised only a first token counts with its whole reply.
    """
    order = np.empty(requests, np.int64)
    waiting = prompts_by_deadline(counts, times, requests, order)
    prompts = promised_prompts(counts, times, order, waiting)
    decodes = new_decodes(requests)
    sums = promised_decodes(counts, times, requests, decodes)
    prompts_hold = 0.0
    for p in range(waiting):
        prompts_hold += prompts.context[p] + prompts.pending[p] + partial_tokens
    changed = True
    most_held, lingering = 0.0, 0.0
    for _ in range(MAX_STEPS):
        if waiting == 0 and changed:
            if _decodes_fit(now_s, decodes, sums, model):
                peak[0] = max(most_held, lingering + _most_decodes_hold(decodes, sums.requests, partial_tokens))
                return peak[0] <= kv_tokens
            changed = False
        shared = ASSUMED if best_effort and waiting > 0 else NONE
        load = form_promised(now_s, decodes, sums, prompts, waiting, model, shared, hold)
        took_s = load_s(load, model)
        if took_s == 0.0:
            peak[0] = most_held
            return True
        if shared == ASSUMED and load.cap_s < np.inf:
            took_s = max(took_s, load.cap_s)  # what is left over will be used
        end_s = now_s + took_s
        if load.earliest_s < end_s - EPSILON_S or _a_prompt_is_late(prompts, waiting, end_s):
            return False
        held = lingering + prompts_hold + sums.context + load.decodes + sums.requests * (partial_tokens - 1.0)
        most_held = max(most_held, held)
        if held > kv_tokens:
            peak[0] = held
            return False
        count, ended_hold = _advance_decodes(decodes, sums.requests, end_s, partial_tokens)
        lingering += ended_hold
        remaining = 0
        for p in range(waiting):
            prompts.context[p] += prompts.granted[p]
            prompts.pending[p] -= prompts.granted[p]
            if prompts.granted[p] == 0 or prompts.pending[p] > 0:
                _move_prompt(prompts, p, remaining)
                remaining += 1
                continue
            release_s[prompts.column[p]] = now_s
            prompts_hold -= prompts.context[p] + partial_tokens
            if prompts.left[p] > 1 and prompts.tpot_s[p] < np.inf:
                _begin_decoding(decodes, count, prompts, p, end_s)
                count += 1
            elif prompts.left[p] > 1:
                lingering += prompts.context[p] + prompts.left[p] - 1 + partial_tokens
        if remaining < waiting or count != sums.requests:
            changed = True
            sums = sums_of(decodes, count)
        else:
            longest = max(sums.longest, load.longest + 1.0)
            sums = Sums(count, sums.tightest_s, sums.demand_per_s, sums.context + load.decodes, longest)
        waiting = remaining
        now_s = end_s
    return False


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _a_prompt_is_late(prompts: Prompts, waiting: int, end_s: float) -> bool:
    """Whether one is that this step completes or leaves out; those that it goes on with are looked at later."""
    for p in range(waiting):
        goes_on = 0 < prompts.granted[p] < prompts.pending[p]
        if not goes_on and prompts.due_s[p] < end_s - EPSILON_S:
            return True
    return False


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _advance_decodes(decodes: Decodes, count: int, end_s: float, partial_tokens: int) -> tuple[int, float]:
    """Each that has a token in the step gets it; those that have all of theirs leave. How many are left, and the KV that is
    still held by those that leave with their promise kept and tokens to come."""
    hold = 0.0
    ended = _give_tokens(decodes.granted, decodes.due_s, decodes.tpot_s, decodes.context, decodes.left, count, end_s)
    if ended == 0:
        return count, 0.0
    remaining = 0
    for k in range(count):
        if not decodes.granted[k] or (decodes.left[k] > 0.0 and decodes.due_s[k] < np.inf):
            _move_decode(decodes, k, remaining)
            remaining += 1
        elif decodes.left[k] > 0.0:
            hold += decodes.context[k] + decodes.left[k] + partial_tokens
    return remaining, hold


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=ANY_ORDER)
def _give_tokens(
    granted: npt.NDArray[np.bool_], due_s: F, tpot_s: F, context: F, left: F, count: int, end_s: float
) -> int:
    """Those granted one get their token (`next_due_s`).

    Returns how many have all of theirs, or were promised no pace and so are never due again.
    """
    ended = 0
    for k in range(count):
        ahead_s = due_s[k] if due_s[k] > end_s else end_s
        most_s = end_s + SLACK_PACES * tpot_s[k]
        ahead_s = (ahead_s if ahead_s < most_s else most_s) + tpot_s[k]
        token = 1.0 if granted[k] else 0.0
        due_s[k] = ahead_s if granted[k] else due_s[k]
        context[k] += token
        left[k] -= token
        ended += granted[k] & ((left[k] <= 0.0) | (due_s[k] == np.inf))
    return ended


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _begin_decoding(decodes: Decodes, count: int, prompts: Prompts, p: int, end_s: float) -> None:
    """A prompt has its first token: it is a decode, at its place by arrival."""
    at = count
    while at > 0 and decodes.column[at - 1] > prompts.column[p]:
        _move_decode(decodes, at - 1, at)
        at -= 1
    decodes.column[at], decodes.tpot_s[at] = prompts.column[p], prompts.tpot_s[p]
    decodes.due_s[at] = next_due_s(prompts.due_s[p], end_s, prompts.tpot_s[p], 0)
    decodes.context[at], decodes.left[at] = prompts.context[p], prompts.left[p] - 1


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _move_decode(decodes: Decodes, source: int, to: int) -> None:
    if source == to:
        return
    decodes.column[to], decodes.due_s[to], decodes.tpot_s[to] = (
        decodes.column[source],
        decodes.due_s[source],
        decodes.tpot_s[source],
    )
    decodes.context[to], decodes.left[to] = decodes.context[source], decodes.left[source]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _move_prompt(prompts: Prompts, source: int, to: int) -> None:
    if source == to:
        return
    prompts.column[to], prompts.context[to] = prompts.column[source], prompts.context[source]
    prompts.pending[to], prompts.left[to] = prompts.pending[source], prompts.left[source]
    prompts.due_s[to], prompts.tpot_s[to], prompts.release_s[to] = (
        prompts.due_s[source],
        prompts.tpot_s[source],
        prompts.release_s[source],
    )


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _most_decodes_hold(decodes: Decodes, count: int, partial_tokens: int) -> float:
    """The most KV that the decodes hold at any time, if each has a token per step until its last one."""
    held, left = decodes.context[:count] + partial_tokens, np.maximum(1.0, decodes.left[:count])
    total, most = held.sum(), 0.0
    order = np.argsort(left)
    for k in range(count):  # just before the k-th to end leaves
        most = max(most, total + (count - k) * left[order[k]])
        total -= held[order[k]]
    return most


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _decodes_fit(now_s: float, decodes: Decodes, sums: Sums, model: StepModel) -> bool:
    """Whether a step with all decodes fits the tightest pace even when each has its longest context.

    Then every step from here on has all of them (they only get fewer), and every token comes in time.
    """
    count, context, longest, limit_s = sums.requests, 0.0, 0.0, sums.tightest_s
    for k in range(count):
        ends = decodes.context[k] + max(1.0, decodes.left[k])
        context += ends
        longest = max(longest, ends)
        limit_s = min(limit_s, decodes.due_s[k] - now_s)
    if count == 0:
        return True
    if count > model.max_step_tokens:
        return False
    return step_s(count, context, 0.0, longest * count - sums.context, model) <= limit_s + EPSILON_S
