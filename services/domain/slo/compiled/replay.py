"""The certificate of an admission: the step policy itself, repeated in virtual time until nothing can go wrong. No I/O."""

import numba
import numpy as np

from services.domain.slo.compiled.layout import (
    BEST_EFFORT,
    CONTEXT,
    DECODING,
    DUE_S,
    EPSILON_S,
    GONE,
    KIND,
    LEFT,
    PENDING,
    STANDARD,
    TPOT_S,
    F,
    N,
    StepModel,
    step_s,
)
from services.domain.slo.compiled.step import ASSUMED, NONE, form_batch, next_due_s, prompts_by_deadline

MAX_STEPS = 20_000
"""A replay gives up, and the admission is refused, after so many steps: at 20 steps a second a quarter of an hour."""


@numba.njit(cache=True, nogil=True)
def keeps_promises(
    now_s: float,
    counts: N,  # (COUNTS, requests), consumed
    times: F,  # (TIMES, requests), consumed
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
    order, grants = np.empty(requests, np.int64), np.empty(requests, np.int64)
    for i in range(requests):
        if counts[KIND, i] == BEST_EFFORT:
            counts[KIND, i] = GONE
    prompts = prompts_by_deadline(counts, times, requests, order)
    changed = True
    most_held, lingering = 0.0, 0.0
    for _ in range(MAX_STEPS):
        if prompts == 0 and changed:
            if _decodes_fit(now_s, counts, times, requests, model):
                peak[0] = max(most_held, lingering + _most_decodes_hold(counts, requests, partial_tokens))
                return peak[0] <= kv_tokens
            changed = False
        shared = ASSUMED if best_effort and prompts > 0 else NONE
        took_s, cap_s = form_batch(now_s, counts, times, requests, order, prompts, model, shared, hold, grants)
        if took_s == 0.0:
            peak[0] = most_held
            return True
        if shared == ASSUMED and cap_s < np.inf:
            took_s = max(took_s, cap_s)  # what is left over will be used
        end_s = now_s + took_s
        begun = 0
        held = lingering
        for i in range(requests):
            if counts[KIND, i] != STANDARD:
                continue
            computed = counts[PENDING, i] if counts[DECODING, i] == 0 else grants[i]
            held += counts[CONTEXT, i] + computed + partial_tokens
            if grants[i] == 0:
                if times[DUE_S, i] < end_s - EPSILON_S:
                    return False
                continue
            counts[CONTEXT, i] += grants[i]
            counts[PENDING, i] -= grants[i]
            if counts[PENDING, i] > 0:
                continue
            if times[DUE_S, i] < end_s - EPSILON_S:
                return False
            if counts[DECODING, i] == 0:
                release_s[i] = now_s
                begun += 1
            times[DUE_S, i] = next_due_s(times[DUE_S, i], end_s, times[TPOT_S, i], counts[DECODING, i])
            counts[PENDING, i], counts[DECODING, i] = 1, 1
            counts[LEFT, i] -= 1
            if counts[LEFT, i] <= 0 or times[TPOT_S, i] == np.inf:
                counts[KIND, i] = GONE
                changed = True
                if counts[LEFT, i] > 0:
                    lingering += counts[CONTEXT, i] + counts[LEFT, i] + partial_tokens
        most_held = max(most_held, held)
        if held > kv_tokens:
            peak[0] = held
            return False
        if begun > 0:
            remaining = 0
            for p in range(prompts):
                if counts[KIND, order[p]] == STANDARD and counts[DECODING, order[p]] == 0:
                    order[remaining] = order[p]
                    remaining += 1
            prompts = remaining
            changed = True
        now_s = end_s
    return False


@numba.njit(cache=True, nogil=True)
def _most_decodes_hold(counts: N, requests: int, partial_tokens: int) -> float:
    """The most KV that the decodes hold at any time, if each has a token per step until its last one."""
    held, left = np.empty(requests), np.empty(requests, np.int64)
    decodes = 0
    for i in range(requests):
        if counts[KIND, i] == STANDARD:
            held[decodes], left[decodes] = counts[CONTEXT, i] + partial_tokens, max(1, counts[LEFT, i])
            decodes += 1
    total, most = held[:decodes].sum(), 0.0
    order = np.argsort(left[:decodes])
    for k in range(decodes):  # just before the k-th to end leaves
        most = max(most, total + (decodes - k) * left[order[k]])
        total -= held[order[k]]
    return most


@numba.njit(cache=True, nogil=True)
def _decodes_fit(now_s: float, counts: N, times: F, requests: int, model: StepModel) -> bool:
    """Whether a step with all decodes fits the tightest pace even when each has its longest context.

    Then every step from here on has all of them (they only get fewer), and every token comes in time.
    """
    decodes, context, now_context, longest = 0, 0.0, 0.0, 0
    limit_s = np.inf
    for i in range(requests):
        if counts[KIND, i] == STANDARD:
            decodes += 1
            ends = counts[CONTEXT, i] + max(1, counts[LEFT, i])
            context += ends
            now_context += counts[CONTEXT, i] + 1
            longest = max(longest, ends)
            limit_s = min(limit_s, times[TPOT_S, i], times[DUE_S, i] - now_s)
    if decodes == 0:
        return True
    if decodes > model.max_step_tokens:
        return False
    gap = longest * decodes - now_context
    return step_s(decodes, context, 0.0, gap, model) <= limit_s + EPSILON_S
