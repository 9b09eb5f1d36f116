"""One engine instance under SLOs in virtual time, compiled: arrivals, admission, steps, best effort. No I/O.

Admission, certificate and steps are those of `services.domain.slo.compiled`. Requests that arrive during a step
are decided on together and take part from the next one on. KV is counted in tokens. Lengths are known: admission reserves
the whole reply, which only an experiment can (a worker reserves a predicted quantile).
"""

import numba
import numpy as np

from services.domain.slo.attainment import PACE_WINDOW_TOKENS, TOLERANCE_S
from services.domain.slo.compiled.admission import MAX_CANDIDATES, decide
from services.domain.slo.compiled.layout import (
    BEST_EFFORT,
    CONTEXT,
    COUNTS,
    DECODING,
    DUE_S,
    KIND,
    LEFT,
    PENDING,
    RELEASE_S,
    STANDARD,
    TIMES,
    TPOT_S,
    F,
    N,
    StepModel,
)
from services.domain.slo.compiled.step import NONE, PRESENT, commit, form_batch, prompts_by_deadline

ADMITTED, SERVED_BEST_EFFORT, DECLINED = 1, 0, -1


@numba.njit(cache=True, nogil=True)
def serve_with_slos(
    arrival_s: F,  # (R) ascending
    prompt: N,  # (R)
    output: N,  # (R) at least 1
    ttft_s: F,  # (R) seconds from arrival; infinite: asks for best effort
    tpot_s: F,  # (R) seconds per output token; infinite for no promise
    tpots_s: F,  # (L) every pace among them, each once
    model: StepModel,
    kv_tokens: int,
    max_running: int,
    decline: bool,  # requests that are not admitted end; otherwise they are served as best effort
    first_s: F,  # (R) out: when the first token came; 0 for those declined
    finish_s: F,  # (R) out: when the last came
    outcome: N,  # (R) out: ADMITTED, SERVED_BEST_EFFORT or DECLINED
    late_windows: N,  # (R) out: windows of ten gaps over the pace, whatever the outcome
    preemptions: N,  # (R) out
) -> int:
    """Serve R requests, each of which fits the KV alone. Returns the number of steps."""
    total = len(arrival_s)
    capacity = max_running
    counts, times = np.zeros((COUNTS, capacity), np.int64), np.zeros((TIMES, capacity))
    who = np.zeros(capacity, np.int64)
    order, grants = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
    queue = np.zeros(total, np.int64)  # best effort, by arrival; those preempted keep their place
    queued = 0
    generated = np.zeros(total, np.int64)
    lead = np.zeros((total, PACE_WINDOW_TOKENS))
    n, arrived, steps = 0, 0, 0
    reserved, best_effort_kv, best_effort_running = 0, 0, 0
    now_s = 0.0
    while True:
        if n == 0 and queued == 0:
            if arrived == total:
                return steps
            now_s = max(now_s, arrival_s[arrived])
        # decide on all that have arrived meanwhile
        new = 0
        while arrived + new < total and arrival_s[arrived + new] <= now_s and new < MAX_CANDIDATES:
            new += 1
        if new > 0:
            asking = 0
            for r in range(arrived, arrived + new):
                asking += ttft_s[r] < np.inf
            new_counts, new_times = np.zeros((COUNTS, asking), np.int64), np.zeros((TIMES, asking))
            memory, value, accepted = np.zeros(asking, np.int64), np.ones(asking), np.zeros(asking, np.int64)
            at = 0
            for r in range(arrived, arrived + new):
                if ttft_s[r] < np.inf:
                    new_counts[KIND, at], new_counts[PENDING, at], new_counts[LEFT, at] = STANDARD, prompt[r], output[r]
                    new_times[DUE_S, at], new_times[TPOT_S, at] = arrival_s[r] + ttft_s[r], tpot_s[r]
                    memory[at] = prompt[r] + output[r]
                    at += 1
            release_s = np.zeros(n + asking)
            standard = n - best_effort_running
            if asking > 0:
                decide(
                    now_s,
                    counts,
                    times,
                    n,
                    new_counts,
                    new_times,
                    memory,
                    value,
                    tpots_s,
                    kv_tokens - reserved,
                    max_running - standard,
                    model,
                    model.reserve > 0,
                    accepted,
                    release_s,
                )
                for i in range(n):
                    times[RELEASE_S, i] = release_s[i]
            release_at = n
            at = 0
            for r in range(arrived, arrived + new):
                asks = ttft_s[r] < np.inf
                if asks and accepted[at] == 1:
                    outcome[r] = ADMITTED
                    reserved += memory[at]
                    # best effort makes room, the one started last first
                    i = n - 1
                    while i >= 0 and (reserved + best_effort_kv > kv_tokens or n >= max_running):
                        if counts[KIND, i] == BEST_EFFORT and outcome[who[i]] != ADMITTED:
                            best_effort_kv -= _preempt(counts, times, who, n, i, queue, queued, preemptions)
                            best_effort_running, queued, n = best_effort_running - 1, queued + 1, n - 1
                        i -= 1
                    for row in range(COUNTS):
                        counts[row, n] = new_counts[row, at]
                    for row in range(TIMES):
                        times[row, n] = new_times[row, at]
                    times[RELEASE_S, n] = release_s[release_at]
                    who[n] = r
                    release_at += 1
                    n += 1
                elif asks and decline:
                    outcome[r] = DECLINED
                else:
                    outcome[r] = SERVED_BEST_EFFORT
                    queued = _queue(queue, queued, r)
                at += asks
            arrived += new
        # best effort: start those for whom all their tokens and the next one have room
        while queued > 0 and n < max_running:
            r = queue[0]
            needs = prompt[r] + generated[r]
            if reserved + best_effort_kv + best_effort_running + needs + 1 > kv_tokens:
                break
            counts[KIND, n], counts[DECODING, n], counts[CONTEXT, n] = BEST_EFFORT, 0, 0
            counts[PENDING, n], counts[LEFT, n] = needs, output[r] - generated[r]
            times[DUE_S, n], times[TPOT_S, n], times[RELEASE_S, n] = np.inf, np.inf, -np.inf
            who[n] = r
            best_effort_kv += needs
            best_effort_running += 1
            n += 1
            for k in range(1, queued):
                queue[k - 1] = queue[k]
            queued -= 1
        # its decodes need a token of KV each
        i = n - 1
        while i >= 0 and reserved + best_effort_kv + best_effort_running > kv_tokens:
            if counts[KIND, i] == BEST_EFFORT and outcome[who[i]] != ADMITTED:
                best_effort_kv -= _preempt(counts, times, who, n, i, queue, queued, preemptions)
                best_effort_running, queued, n = best_effort_running - 1, queued + 1, n - 1
            i -= 1
        prompts = prompts_by_deadline(counts, times, n, order)
        left_over = NONE
        for i in range(n):
            left_over = PRESENT if counts[KIND, i] == BEST_EFFORT else left_over
        took_s, _ = form_batch(now_s, counts, times, n, order, prompts, model, left_over, False, grants)
        if took_s == 0.0:
            if n == 0 and queued == 0:  # all that came were declined
                continue
            if arrived == total:
                return -1  # cannot be: somebody waits, nobody runs
            now_s = max(now_s, arrival_s[arrived])
            continue
        now_s += took_s
        steps += 1
        commit(now_s, counts, times, n, grants)
        i = 0
        for k in range(n):
            r = who[i]
            emitted = grants[k] > 0 and output[r] - generated[r] > counts[LEFT, i]
            if emitted:
                g = generated[r]
                if g == 0:
                    first_s[r] = now_s
                elif tpot_s[r] < np.inf and (g >= PACE_WINDOW_TOKENS or g + 1 == output[r]):  # or all of a short reply
                    since = lead[r, max(0, g - PACE_WINDOW_TOKENS) % PACE_WINDOW_TOKENS]
                    late_windows[r] += now_s - g * tpot_s[r] - since > TOLERANCE_S
                lead[r, g % PACE_WINDOW_TOKENS] = now_s - g * tpot_s[r] if tpot_s[r] < np.inf else 0.0
                generated[r] = g + 1
                if outcome[r] != ADMITTED:
                    best_effort_kv += 1
                if counts[LEFT, i] <= 0:
                    finish_s[r] = now_s
                    if outcome[r] == ADMITTED:
                        reserved -= prompt[r] + output[r]
                    else:
                        best_effort_kv -= prompt[r] + generated[r]
                        best_effort_running -= 1
                    n = _remove(counts, times, who, n, i)
                    continue
            i += 1


@numba.njit(cache=True, nogil=True)
def _queue(queue: N, queued: int, r: int) -> int:
    """By arrival; returns how many are queued."""
    at = queued
    while at > 0 and queue[at - 1] > r:
        queue[at] = queue[at - 1]
        at -= 1
    queue[at] = r
    return queued + 1


@numba.njit(cache=True, nogil=True)
def _remove(counts: N, times: F, who: N, n: int, i: int) -> int:
    """Take column i out, order kept; returns how many are left."""
    for k in range(i + 1, n):
        for row in range(COUNTS):
            counts[row, k - 1] = counts[row, k]
        for row in range(TIMES):
            times[row, k - 1] = times[row, k]
        who[k - 1] = who[k]
    return n - 1


@numba.njit(cache=True, nogil=True)
def _preempt(counts: N, times: F, who: N, n: int, i: int, queue: N, queued: int, preemptions: N) -> int:
    """Queue the best-effort request of column i again and take the column out; returns the KV tokens that it held."""
    held = counts[CONTEXT, i] + counts[PENDING, i]
    _queue(queue, queued, who[i])
    preemptions[who[i]] += 1
    _remove(counts, times, who, n, i)
    return held
