"""Forms the next batch under SLOs: section 3.2.2 and Algorithm 2, one step at a time. No I/O.

A step may take as long as the earliest token of a decode allows, and takes as many tokens as fit in that time:

1. Decodes, by when their next token is due: all that cannot wait for one more step, and at least the share of this step that
   their paces ask for together (sum of step / tpot), so that requests of a loose pace do not fall due all at once.
   (Algorithm 2, line 9, prints `schDDL >= i t0`; a token must be in the batch if it is due before the next one can end.)
2. Prompts of standard requests, by deadline. The last token of a prompt waits for its release time, which the certificate
   of its admission set: a prompt that completes early decodes early, which may break what others were promised.
   A prompt that would be late next to the decodes goes alone and first, where all of them can wait for the next step.
3. The other decodes, where there is time left.
4. Best effort: its decodes, then its prompts, in order of arrival. `reserve` of the step's time is kept for it, but for
   prompts that cannot wait: these may borrow it. Certificates assume that best effort always has work and lends nothing.

A pace is judged over every window of ten gaps, and kept by a stricter rule (`next_due_s`): a token is due a pace behind the
time at which the one before was due, and at most SLACK_PACES further behind the time at which that came. So what came early
may be used later, for instance by a prompt that does not fit between two tokens. TPOT_S is KEPT_SHARE of the promised pace:

    due[k + 10] <= due[k] + 10 tpot <= came[k] + SLACK_PACES tpot + 10 tpot = came[k] + 10 promised.

The first token counts as due when it came, so that a reply shorter than a window is in time as a whole, too.
"""

import numba
import numpy as np

from services.domain.slo.compiled.layout import (
    BEST_EFFORT,
    CONTEXT,
    DECODING,
    DUE_S,
    EPSILON_S,
    KIND,
    LEFT,
    PENDING,
    RELEASE_S,
    SLACK_PACES,
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


@numba.njit(cache=True, nogil=True)
def next_due_s(due_s: float, end_s: float, tpot_s: float, decoding: int) -> float:
    """When the token is due behind one that came at `end_s` and was due at `due_s`. decoding: 0 if that was the first one."""
    ahead_s = min(max(due_s, end_s), end_s + SLACK_PACES * tpot_s) if decoding == 1 else end_s
    return float(ahead_s + tpot_s)


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def prompts_by_deadline(counts: N, times: F, requests: int, order: N) -> int:
    """Fill `order` with the standard requests whose prompts are to be computed, earliest deadline first; how many."""
    count = 0
    for i in range(requests):
        if counts[KIND, i] == STANDARD and counts[DECODING, i] == 0:
            at = count
            while at > 0 and times[DUE_S, order[at - 1]] > times[DUE_S, i]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = i
            count += 1
    return count


@numba.njit(cache=True, nogil=True)
def form_batch(
    now_s: float,
    counts: N,  # (COUNTS, >= requests)
    times: F,  # (TIMES, >= requests)
    requests: int,
    order: N,  # of prompts_by_deadline
    prompts: int,  # how many
    model: StepModel,
    best_effort: int,  # NONE, PRESENT, or ASSUMED by a certificate
    hold: bool,  # prompts complete as late as they can, whatever their release times
    grants: N,  # (>= requests) out: tokens of each
) -> tuple[float, float]:
    """Decide the tokens of the step that begins now.

    Returns the seconds it will take, 0 for an empty one, and the seconds it may take (infinite without limit).
    """
    # what the decodes allow and ask for
    limit_s, tightest_s, demand_per_s, decodes = np.inf, np.inf, 0.0, 0
    for i in range(requests):
        grants[i] = 0
        if counts[KIND, i] == STANDARD and counts[DECODING, i] == 1:
            decodes += 1
            limit_s = min(limit_s, times[DUE_S, i] - now_s)
            tightest_s = min(tightest_s, times[TPOT_S, i])
            demand_per_s += 1.0 / times[TPOT_S, i]
    longest_step_s = min(tightest_s, base_s(model.max_step_tokens, model))
    cannot_wait_s = 2.0 * longest_step_s - EPSILON_S
    room = model.max_step_tokens
    tokens, context, pairs = 0, 0.0, 0.0
    decode_context, longest, taken = 0.0, 0, 0

    # 1. decodes
    if decodes > 0:
        quota = int(np.ceil(demand_per_s * max(0.0, min(limit_s, longest_step_s)) - EPSILON_S))
        due = np.empty(decodes)
        urgent = 0
        k = 0
        for i in range(requests):
            if counts[KIND, i] == STANDARD and counts[DECODING, i] == 1:
                due[k] = times[DUE_S, i]
                urgent += due[k] - now_s < cannot_wait_s
                k += 1
        quota = min(max(quota, urgent), decodes, room)
        last_s, ties = np.inf, decodes
        if quota < decodes and quota > 0:
            last_s = kth_smallest(due, quota - 1)
            ties = quota
            for k in range(decodes):
                ties -= due[k] < last_s
        if quota > 0:
            for i in range(requests):
                if counts[KIND, i] != STANDARD or counts[DECODING, i] == 0:
                    continue
                at_last = times[DUE_S, i] >= last_s
                if at_last and (times[DUE_S, i] > last_s or ties == 0):
                    continue
                ties -= at_last
                grants[i] = 1
                taken += 1
                ends = counts[CONTEXT, i] + 1
                decode_context += ends
                longest = max(longest, ends)
        tokens, context = taken, decode_context
    gap = longest * taken - decode_context
    cap_s = limit_s
    if taken > 0 and prompts > 0:
        later_s = _alone_first_s(now_s, counts, times, requests, order[0], taken, decode_context, gap, limit_s, model)
        if later_s < np.inf:
            for i in range(requests):
                grants[i] = 0
            tokens, taken, longest = 0, 0, 0
            context, decode_context, gap = 0.0, 0.0, 0.0
            cap_s = limit_s - later_s

    # 2. prompts
    for p in range(prompts):
        if tokens >= room:
            break
        i = order[p]
        slack_s = times[DUE_S, i] - now_s
        free_to_end = slack_s < cannot_wait_s or (not hold and now_s >= times[RELEASE_S, i] - EPSILON_S)
        allowed = counts[PENDING, i] - (0 if free_to_end else 1)
        if allowed <= 0:
            continue
        reserved = best_effort == ASSUMED or (best_effort == PRESENT and slack_s >= cannot_wait_s)
        within_s = cap_s * (1.0 - model.reserve) if reserved and cap_s < np.inf else cap_s
        start = counts[CONTEXT, i]
        c = tokens_within(within_s, min(allowed, room - tokens), start, tokens, context, pairs, gap, model)
        if c <= 0:
            break
        grants[i] = c
        tokens += c
        context += start + c
        pairs += c * (start + 0.5 * (c + 1))
        if c == counts[PENDING, i]:  # its first token comes at the end of this step
            cap_s = min(cap_s, max(slack_s, step_s(tokens, context, pairs, gap, model)))

    # nothing but last tokens that wait: do not stand idle
    if tokens == 0 and prompts > 0:
        i = order[0]
        c = min(counts[PENDING, i], room)
        grants[i] = c
        start = counts[CONTEXT, i]
        tokens, context, pairs = c, float(start + c), c * (start + 0.5 * (c + 1))
        cap_s = max(times[DUE_S, i] - now_s, step_s(tokens, context, pairs, gap, model))

    for p in range(prompts):
        if (
            grants[order[p]] < counts[PENDING, order[p]]
        ):  # a prompt that goes on must not be held up by what fills the step
            cap_s = min(cap_s, max(longest_step_s, step_s(tokens, context, pairs, gap, model)))
            break

    # 3. and 4. what else fits
    if taken < decodes or best_effort == PRESENT:
        for kind in range(STANDARD, BEST_EFFORT + 1):
            for i in range(requests):
                if tokens >= room:
                    break
                if counts[KIND, i] != kind or counts[DECODING, i] == 0 or grants[i] > 0:
                    continue
                ends = counts[CONTEXT, i] + 1
                wider = max(longest, ends) * (taken + 1) - (decode_context + ends)
                if step_s(tokens + 1, context + ends, pairs, wider, model) > cap_s + EPSILON_S:
                    break
                grants[i] = 1
                taken += 1
                tokens += 1
                context += ends
                decode_context += ends
                longest, gap = max(longest, ends), wider
    if best_effort == PRESENT:
        for i in range(requests):
            if tokens >= room:
                break
            if counts[KIND, i] != BEST_EFFORT or counts[DECODING, i] == 1:
                continue
            start = counts[CONTEXT, i]
            c = tokens_within(cap_s, min(counts[PENDING, i], room - tokens), start, tokens, context, pairs, gap, model)
            if c <= 0:
                break
            grants[i] = c
            tokens += c
            context += start + c
            pairs += c * (start + 0.5 * (c + 1))
    return step_s(tokens, context, pairs, gap, model), cap_s


@numba.njit(cache=True, nogil=True)
def _alone_first_s(
    now_s: float,
    counts: N,
    times: F,
    requests: int,
    prompt: int,  # the one that is due first
    taken: int,  # decodes that this step would have
    decode_context: float,  # of those
    gap: float,  # of those
    limit_s: float,
    model: StepModel,
) -> float:
    """Seconds of a step with all decodes, where a prompt goes before it alone; infinite where it does not.

    It does where it would be late in a step with the decodes and is not without them, and they can all wait for the step
    behind it: the short prompt of a request whose first token is due within little more than a step.
    """
    slack_s = times[DUE_S, prompt] - now_s
    count, start = counts[PENDING, prompt], counts[CONTEXT, prompt]
    pairs = count * (start + 0.5 * (count + 1))
    together = step_s(taken + count, decode_context + start + count, pairs, gap, model)
    if together <= slack_s + EPSILON_S or count > model.max_step_tokens:
        return np.inf
    alone = step_s(count, float(start + count), pairs, 0.0, model)
    if alone > slack_s + EPSILON_S:
        return np.inf
    decodes, context, longest = 0, 0.0, 0
    for i in range(requests):
        if counts[KIND, i] == STANDARD and counts[DECODING, i] == 1:
            ends = counts[CONTEXT, i] + 1
            decodes += 1
            context += ends
            longest = max(longest, ends)
    later: float = step_s(decodes, context, 0.0, longest * decodes - context, model)
    fits = decodes <= model.max_step_tokens and alone + later <= limit_s + EPSILON_S
    return later if fits else np.inf


@numba.njit(cache=True, nogil=True)
def commit(end_s: float, counts: N, times: F, requests: int, grants: N) -> None:
    """The step has ended: what reached its last token has got the next one, which is due a pace later."""
    for i in range(requests):
        if grants[i] == 0:
            continue
        counts[CONTEXT, i] += grants[i]
        counts[PENDING, i] -= grants[i]
        if counts[PENDING, i] == 0:
            times[DUE_S, i] = next_due_s(times[DUE_S, i], end_s, times[TPOT_S, i], counts[DECODING, i])
            counts[PENDING, i] = 1
            counts[DECODING, i] = 1
            counts[LEFT, i] -= 1
            if times[TPOT_S, i] == np.inf:  # the first token was all that was promised
                counts[KIND, i] = BEST_EFFORT
