"""Admission: the dynamic program of `services.domain.slo.admission`, compiled, with the certificate behind it. No I/O.

The recurrence takes the best over the last accepted request j before i. As the budget grows at a rate that depends on the
counts alone, PB*(a + b, n) = PB*(a, n) + PB*(b, n), and all states can be carried along to each deadline in turn: a state is
then extended by the request there or left as it is. States of equal counts n are kept only where none has at least as much
value and budget with at most as much memory. Where all values are 1 and memory cannot bind, that is one state per n: the
request-throughput form of appendix C, `pb[i, n]`, at its cost.
"""

import numba
import numpy as np

from services.domain.slo.compiled.certificate import certified, columns, count_bits
from services.domain.slo.compiled.layout import (
    CONTEXT,
    COUNTS,
    DECODING,
    DUE_S,
    KIND,
    PENDING,
    RELEASE_S,
    STANDARD,
    TIMES,
    TPOT_S,
    F,
    N,
    StepModel,
    base_s,
    tokens_within,
)
from services.domain.slo.compiled.replay import keeps_promises

MAX_CANDIDATES = 60
"""Decided together: their sets are bits of one word. More are decided in the next round."""
MAX_STATES = 4_096
"""Kept at one deadline. Beyond, the states found last are dropped: the answer stays sound and may not be the best."""
MAX_CERTIFICATES = 16
"""Replays that one decision may take."""
TOLERANCE_TOKENS = 1e-6
UNLIMITED_TOKENS = 2.0**60
SKIPPED_SHARE, SKIPPED_SHARE_KV = 8, 2
"""Where a set of n requests is late, the next one tried has n / SKIPPED_SHARE fewer, at least one; where it runs out of KV,
which the program hardly foresees, n / SKIPPED_SHARE_KV fewer. Those left out are then tried one by one."""


@numba.njit(cache=True, nogil=True, error_model="numpy")
def budget_per_s(counts: N, tpots_s: F, context_tokens: float, model: StepModel) -> float:
    """BudgetModel.tokens_per_s: (L) counts, (L) paces."""
    step_s = np.inf
    for tier in range(len(tpots_s)):
        if counts[tier] > 0:
            step_s = min(step_s, tpots_s[tier])
    step_s = min(step_s, base_s(model.max_step_tokens, model) / (1.0 - model.reserve))
    decodes = 0.0
    for tier in range(len(tpots_s)):
        decodes += counts[tier] * step_s / tpots_s[tier]
    context = float(round(context_tokens * decodes))
    fitting = tokens_within((1.0 - model.reserve) * step_s, model.max_step_tokens - 1, 0, 1, context, 0.0, 0.0, model)
    return (fitting + 1 - decodes) / step_s


@numba.njit(cache=True, nogil=True, error_model="numpy")
def best_sets(
    due_s: F,  # (E) from now: entries by deadline, ties by arrival, those committed before candidates
    tokens: N,  # (E) prompt tokens to compute
    tier: N,  # (E) index of the pace
    memory: N,  # (E)
    value: F,  # (E)
    candidate: N,  # (E) number of the candidate, -1 for one that is committed
    tpots_s: F,  # (L)
    decoding: N,  # (L) running decodes
    context_tokens: float,
    free_memory: int,
    free_places: int,
    model: StepModel,
    found_value: F,  # (C + 1) out: by count of accepted candidates, the best value; -inf where there is no such set
    found_set: N,  # (C + 1) out: its bits
) -> bool:
    """The dynamic program. False where those committed do not fit by themselves."""
    entries, tiers = len(due_s), len(tpots_s)
    stride = np.ones(tiers + 1, np.int64)
    for t in range(tiers):
        stride[t + 1] = stride[t] * (1 + np.sum(tier == t))
    rates = np.full(stride[tiers], np.nan)
    new_memory = 0
    for e in range(entries):
        if candidate[e] >= 0:
            new_memory += memory[e]
    binding = new_memory > free_memory
    worth, left = np.zeros(MAX_STATES), np.zeros(MAX_STATES)
    used, at, bits = np.zeros(MAX_STATES, np.int64), np.zeros(MAX_STATES, np.int64), np.zeros(MAX_STATES, np.int64)
    worth2, left2 = np.empty(MAX_STATES), np.empty(MAX_STATES)
    used2, at2, bits2 = np.empty(MAX_STATES, np.int64), np.empty(MAX_STATES, np.int64), np.empty(MAX_STATES, np.int64)
    head, following = np.empty(stride[tiers], np.int64), np.empty(MAX_STATES, np.int64)
    states, time_s = 1, 0.0
    if _rate(0, rates, stride, tpots_s, decoding, context_tokens, model) < 0:
        return False
    for e in range(entries):
        passed_s = max(0.0, due_s[e] - time_s)
        time_s = max(time_s, due_s[e])
        grown = stride[tier[e]]
        forced = candidate[e] < 0
        head[:] = -1
        stored = 0
        for take in range(1 if forced else 0, 2):  # those without it first: of equals, who came first is accepted
            for s in range(states):
                budget = left[s] + passed_s * _rate(at[s], rates, stride, tpots_s, decoding, context_tokens, model)
                worth_s, budget_s, used_s, at_s, bits_s = worth[s], budget, used[s], at[s], bits[s]
                if take == 1:
                    budget_s -= tokens[e]
                    at_s += grown
                    if budget_s < -TOLERANCE_TOKENS:
                        continue
                    if _rate(at_s, rates, stride, tpots_s, decoding, context_tokens, model) < 0:
                        continue
                    if not forced:
                        worth_s += value[e]
                        bits_s |= np.int64(1) << candidate[e]
                        used_s += memory[e] if binding else 0
                        if used_s > free_memory or count_bits(bits_s) > free_places:
                            continue
                # of equal counts, keep what no other beats
                k, beaten, before = head[at_s], False, -1
                while k >= 0:
                    if worth2[k] >= worth_s and left2[k] >= budget_s and used2[k] <= used_s:
                        beaten = True
                        break
                    after = following[k]
                    if worth_s >= worth2[k] and budget_s >= left2[k] and used_s <= used2[k]:
                        at2[k] = -1  # out
                        if before < 0:
                            head[at_s] = after
                        else:
                            following[before] = after
                    else:
                        before = k
                    k = after
                if beaten or stored == MAX_STATES:
                    continue
                worth2[stored], left2[stored], used2[stored], at2[stored], bits2[stored] = (
                    worth_s,
                    budget_s,
                    used_s,
                    at_s,
                    bits_s,
                )
                following[stored] = head[at_s]
                head[at_s] = stored
                stored += 1
        states = 0
        for k in range(stored):
            if at2[k] >= 0:
                worth[states], left[states], used[states] = worth2[k], left2[k], used2[k]
                at[states], bits[states] = at2[k], bits2[k]
                states += 1
        if states == 0:
            return False
    found_value[:] = -np.inf
    best_left = np.full(len(found_value), -np.inf)
    for s in range(states):
        c = count_bits(bits[s])
        if worth[s] > found_value[c] or (worth[s] == found_value[c] and left[s] > best_left[c]):
            found_value[c], found_set[c], best_left[c] = worth[s], bits[s], left[s]
    return True


@numba.njit(cache=True, nogil=True, error_model="numpy")
def decide(
    now_s: float,
    counts: N,  # (COUNTS, >= running) of the running requests, as they will be when the current step ends
    times: F,  # (TIMES, >= running)
    running: int,
    new_counts: N,  # (COUNTS, C) of the candidates, by arrival; at most MAX_CANDIDATES
    new_times: F,  # (TIMES, C)
    value: F,  # (C)
    tpots_s: F,  # (L) paces, ascending; the first is the tightest of the requests
    free_places: int,
    model: StepModel,
    best_effort: bool,
    accepted: N,  # (C) out: 1 or 0
    release_s: F,  # (running + C) out: release times, of the running requests and behind them of those accepted
    kv_tokens: float,  # for all promised requests at any time
    partial_tokens: int,  # see keeps_promises
    peak: F,  # (1) out: the most KV tokens that the running and the accepted requests hold at any time, where that is known
) -> int:
    """Decide which candidates are admitted; returns how many replays that took.

    The best set of each count is tried, the one of most value first, until one passes its certificate: first with prompts
    that complete as early as they can, then, should that break a promise, with prompts that complete as late as they may.
    Then each candidate left out is tried once together with those accepted, that of most value per prompt token first: the
    program takes every decode to last without limit, the replay knows when it will end.

    KV is checked over time. The program only rules out sets whose prompts do not fit next to what is held now; the
    certificate follows what every request holds from step to step.

    best_effort: whether requests without a promise are assumed to use what time is left over. They come and go, so a set must
    pass in the other case, too. That is replayed at the end; if it fails, everything is decided once more with both cases
    replayed for every set.
    """
    tries = 0
    for both in range(2):
        tries += _decide(
            now_s,
            counts,
            times,
            running,
            new_counts,
            new_times,
            value,
            tpots_s,
            free_places,
            model,
            best_effort,
            both == 1,
            accepted,
            release_s,
            kv_tokens,
            partial_tokens,
            peak,
        )
        chosen = np.int64(0)
        for c in range(new_counts.shape[1]):
            chosen |= np.int64(accepted[c]) << c
        if chosen == 0 or both == 1:
            break
        requests = running + count_bits(chosen)
        all_counts, all_times = np.empty((COUNTS, requests), np.int64), np.empty((TIMES, requests))
        columns(counts, times, running, new_counts, new_times, chosen, all_counts, all_times)
        for i in range(requests):
            all_times[RELEASE_S, i] = release_s[i]
        released_s, held = np.empty(requests), np.zeros(1)
        passes = keeps_promises(
            now_s,
            all_counts,
            all_times,
            requests,
            model,
            not best_effort,
            np.bool_(False),  # numba would compile the replay once more for a constant
            released_s,
            kv_tokens,
            partial_tokens,
            held,
        )
        tries += 1
        if passes:
            peak[0] = max(peak[0], held[0])
            break
        peak[0] = np.inf
    return tries


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _decide(
    now_s: float,
    counts: N,  # (COUNTS, >= running) of the running requests, as they will be when the current step ends
    times: F,  # (TIMES, >= running)
    running: int,
    new_counts: N,  # (COUNTS, C) of the candidates, by arrival; at most MAX_CANDIDATES
    new_times: F,  # (TIMES, C)
    value: F,  # (C)
    tpots_s: F,  # (L) paces, ascending; the first is the tightest of the requests
    free_places: int,
    model: StepModel,
    best_effort: bool,
    both: bool,  # replay every set with and without best effort
    accepted: N,  # (C) out: 1 or 0
    release_s: F,  # (running + C) out: release times, of the running requests and behind them of those accepted
    kv_tokens: float,  # for all promised requests at any time
    partial_tokens: int,  # see keeps_promises
    peak: F,  # (1) out: the most KV tokens that the running and the accepted requests hold at any time, where that is known
) -> int:
    """`decide` without the replay at the end."""
    candidates = new_counts.shape[1]
    accepted[:] = 0
    for i in range(running):
        release_s[i] = times[RELEASE_S, i]
    most = running + candidates
    due, worth = np.empty(most), np.zeros(most)
    tokens, tier = np.empty(most, np.int64), np.empty(most, np.int64)
    needs, number = np.zeros(most, np.int64), np.empty(most, np.int64)
    decoding = np.zeros(len(tpots_s), np.int64)
    entries, contexts, requests = 0, 0, 0
    free_memory = min(kv_tokens, UNLIMITED_TOKENS)
    for i in range(running + candidates):
        c = i - running
        of_counts, of_times, column = (counts, times, i) if c < 0 else (new_counts, new_times, c)
        if of_counts[KIND, column] != STANDARD:
            continue
        length = of_counts[CONTEXT, column] + of_counts[PENDING, column]
        contexts += length
        requests += 1
        free_memory -= 0 if c >= 0 else length + partial_tokens
        pace = _tier(of_times[TPOT_S, column], tpots_s)
        if c < 0 and of_counts[DECODING, column] == 1:
            decoding[pace] += 1
            continue
        due_s = of_times[DUE_S, column] - now_s
        at = entries
        while at > 0 and due[at - 1] > due_s:  # by deadline, ties as they come
            due[at], tokens[at], tier[at] = due[at - 1], tokens[at - 1], tier[at - 1]
            needs[at], worth[at], number[at] = needs[at - 1], worth[at - 1], number[at - 1]
            at -= 1
        due[at], tokens[at], tier[at], number[at] = due_s, of_counts[PENDING, column], pace, max(-1, c)
        needs[at], worth[at] = (0, 0.0) if c < 0 else (length + partial_tokens, value[c])
        entries += 1
    found_value, found_set = np.full(candidates + 1, -np.inf), np.zeros(candidates + 1, np.int64)
    best_sets(
        due[:entries],
        tokens[:entries],
        tier[:entries],
        needs[:entries],
        worth[:entries],
        number[:entries],
        tpots_s,
        decoding,
        contexts / max(1, requests),
        np.int64(max(0.0, free_memory)),
        free_places,
        model,
        found_value,
        found_set,
    )
    tries = 0
    chosen = np.int64(0)
    while tries < MAX_CERTIFICATES:
        best = 0
        for c in range(1, candidates + 1):
            if found_value[c] > -np.inf and (best == 0 or found_value[c] >= found_value[best]):
                best = c
        if best == 0:
            break
        passed, took, short = certified(
            now_s,
            counts,
            times,
            running,
            new_counts,
            new_times,
            found_set[best],
            model,
            best_effort,
            both,
            release_s,
            kv_tokens,
            partial_tokens,
            peak,
        )
        tries += took
        if passed:
            chosen = found_set[best]
            break
        for c in range(best - max(1, best // (SKIPPED_SHARE_KV if short else SKIPPED_SHARE)) + 1, best + 1):
            found_value[c] = -np.inf
    if chosen == 0:  # no candidate fits in addition to running requests that are late already
        passed, took, _ = certified(
            now_s,
            counts,
            times,
            running,
            new_counts,
            new_times,
            chosen,
            model,
            best_effort,
            both,
            release_s,
            kv_tokens,
            partial_tokens,
            peak,
        )
        tries += took
        if not passed:
            return tries
    by_worth = np.argsort(-value / np.maximum(1, new_counts[PENDING]), kind="mergesort")
    for c in by_worth:
        if chosen >> c & 1 or tries >= MAX_CERTIFICATES:
            continue
        if count_bits(chosen) >= free_places:
            continue
        wider = chosen | np.int64(1) << c
        passed, took, _ = certified(
            now_s,
            counts,
            times,
            running,
            new_counts,
            new_times,
            wider,
            model,
            best_effort,
            both,
            release_s,
            kv_tokens,
            partial_tokens,
            peak,
        )
        tries += took
        if passed:
            chosen = wider
    for c in range(candidates):
        accepted[c] = chosen >> c & 1
    return tries


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _rate(at: int, rates: F, stride: N, tpots_s: F, decoding: N, context_tokens: float, model: StepModel) -> float:
    """The budget per second with the counts of state `at`, kept in `rates`."""
    if np.isnan(rates[at]):
        n = decoding.copy()
        for t in range(len(n)):
            n[t] += at // stride[t] % (stride[t + 1] // stride[t])
        rates[at] = budget_per_s(n, tpots_s, context_tokens, model)
    return rates[at]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _tier(tpot_s: float, tpots_s: F) -> int:
    """The greatest pace that is not looser than this one: its own, or a tighter one that stands for it."""
    tier = 0
    for t in range(len(tpots_s)):
        if tpots_s[t] <= tpot_s:
            tier = t
    return tier
