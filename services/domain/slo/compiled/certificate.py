"""The certificate of a set of candidates: replays of the running requests with them. No I/O."""

import numba
import numpy as np

from services.domain.slo.compiled.layout import (
    CONTEXT,
    COUNTS,
    KIND,
    LEFT,
    PENDING,
    RELEASE_S,
    STANDARD,
    TIMES,
    F,
    N,
    StepModel,
)
from services.domain.slo.compiled.replay import keeps_promises


@numba.njit(cache=True, nogil=True, error_model="numpy")
def certified(
    now_s: float,
    counts: N,
    times: F,
    running: int,
    new_counts: N,
    new_times: F,
    chosen: int,
    model: StepModel,
    best_effort: bool,
    both: bool,
    release_s: F,
    kv_tokens: float,
    partial_tokens: int,
    peak: F,
) -> tuple[bool, int, bool]:
    """Replay the running requests with the chosen candidates; release_s and peak are written only where they pass.

    Returns whether they pass, how many replays that took, and whether KV is what they fail by.
    """
    requests = running + count_bits(chosen)
    all_counts, all_times = np.empty((COUNTS, requests), np.int64), np.empty((TIMES, requests))
    found_s, again_s, held = np.empty(requests), np.empty(requests), np.zeros(1)
    tries = 0
    columns(counts, times, running, new_counts, new_times, chosen, all_counts, all_times)
    whole = 0.0
    for i in range(requests):
        if all_counts[KIND, i] == STANDARD:
            whole += all_counts[CONTEXT, i] + all_counts[PENDING, i] + all_counts[LEFT, i] + partial_tokens
    for hold in range(2):
        found_s[:], held[0] = -np.inf, 0.0
        all_times[RELEASE_S] = -np.inf
        passes = keeps_promises(
            now_s,
            all_counts,
            all_times,
            requests,
            model,
            best_effort,
            hold == 1,
            found_s,
            kv_tokens,
            partial_tokens,
            held,
        )
        tries += 1
        if passes and (both or whole > kv_tokens):
            # How long steps take depends on best effort, and with it which tokens are held together: try the other case, too.
            all_times[RELEASE_S] = found_s
            assumed = held[0]
            passes = keeps_promises(
                now_s,
                all_counts,
                all_times,
                requests,
                model,
                not best_effort,
                np.bool_(False),  # numba would compile the replay once more for a constant
                again_s,
                kv_tokens,
                partial_tokens,
                held,
            )
            held[0] = max(held[0], assumed)
            tries += 1
        if passes:
            peak[0] = held[0]
            for i in range(requests):
                release_s[i] = found_s[i]
            return True, tries, False
        if held[0] > kv_tokens:
            return False, tries, True
    return False, tries, False


@numba.njit(cache=True, nogil=True, error_model="numpy")
def columns(
    counts: N, times: F, running: int, new_counts: N, new_times: F, chosen: int, all_counts: N, all_times: F
) -> int:
    """Copy the columns of the running requests and of the chosen candidates, without release times; how many they are."""
    at = 0
    for i in range(running + new_counts.shape[1]):
        c = i - running
        if c >= 0 and chosen >> c & 1 == 0:
            continue
        for row in range(COUNTS):
            all_counts[row, at] = counts[row, i] if c < 0 else new_counts[row, c]
        for row in range(TIMES):
            all_times[row, at] = times[row, i] if c < 0 else new_times[row, c]
        all_times[RELEASE_S, at] = -np.inf
        at += 1
    return at


@numba.njit(cache=True, nogil=True, error_model="numpy")
def count_bits(bits: int) -> int:
    count = 0
    while bits > 0:
        bits &= bits - 1
        count += 1
    return count
