"""A replica from its first request to its last in virtual time, compiled. No I/O.

Its steps are those of `batch_step`. What makes it fast: while nothing can change but contexts that grow (all decode,
no request ends, none can start), steps are *quiet*: step i of a run takes a + b i, so k of them take k a + b k (k - 1) /
2, and a whole run up to the next arrival is one jump (with several lanes, whose steps interleave, one addition per
step).

Pipeline stages: a replica of `stages` stages runs as many batches at once, its lanes. Requests go to the lanes in turn and
each lane has its share of the KV. A step enters the first stage when that is free, takes step_s in all, and leaves no
sooner than one stage's time behind the step before it (the recurrence of a permutation flow shop).

Prefix reuse: a request starts with the KV of its cached tokens. It counts as its own KV, whole, though others may share it;
and after a preemption all of its tokens are computed again.

Where all requests have one priority, `in_order` takes the same steps in less time, unless a request would be preempted.
"""

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from planner_service.simulator.batch_step import (
    BATCH_COUNTS,
    BLOCK_TOKENS,
    BUSY_S,
    CONTEXT_S,
    COUNTERS,
    DECODE_FIRST,
    FIRST_TOKEN,
    FREE,
    GAP_S,
    MAX_RUNNING,
    MAX_STEP_TOKENS,
    PACE,
    PEAK_RUNNING,
    POLICY,
    PREEMPTIONS,
    PRIORITY_STEP,
    RUNNING,
    STEPS,
    TOKENS,
    WAITING,
    WITHOUT_ALLOCATION,
    Engine,
    Requests,
    base_s,
    blocks_for,
    commit,
    insert,
    measured_s,
    plan_step,
    quiet_steps,
    run_s,
    step_s,
    steps_until,
)
from planner_service.simulator.in_order import PREEMPTED, serve_in_order

F = npt.NDArray[np.float64]
N = npt.NDArray[np.int64]
B = npt.NDArray[np.bool_]

# of a lane: quiet steps that may still follow; those that are not yet in length and computed; the context of the next one,
# and how much longer its longest is
LEFT, DONE, CONTEXT, GAP = range(4)
QUIET_COUNTS = 4


class Lanes(NamedTuple):
    """The L lanes of a replica with their batches, over R requests.

    counts (L, BATCH_COUNTS). running, waiting (L, R): request numbers by rank. upcoming (L): the next request of each to
    arrive. ready_s (L): when its step ends. quiet (L, QUIET_COUNTS), and quiet_s (L): the base time of its quiet steps.
    """

    counts: N
    running: N
    waiting: N
    upcoming: N
    ready_s: F
    quiet: N
    quiet_s: F


@numba.njit(cache=True, nogil=True)
def simulate_replica(
    arrival_s: F,  # (N) ascending
    prompt: N,  # (N) tokens
    output: N,  # (N) tokens, at least 1
    cached: N,  # (N) of the prompt, tokens whose KV is there when the request comes, less than all of them
    priority: N,  # (N) the higher goes first
    shape: N,  # (2): stages, blocks of a lane
    limits: N,  # (4), see batch_step; of a lane
    rates: F,  # (4), likewise
    kx: F,
    ky: F,
    jump: bool,  # over quiet steps
    due_s: F,  # (N) a request that ends then or later is late; of the pace, one that takes so long per token or longer
    late_allowed: int,
    first_s: F,  # (N) out: when the first token came
    finish_s: F,  # (N) out: when the last came
    counters: F,  # (COUNTERS) out
    measured: int,  # what is due: the last token, the first token, or the pace
) -> int:
    """Serve N requests; each must fit a lane's KV alone. Returns how many were late.

    Gives up, with the rest of the outputs left as they were, once more are late than allowed.
    """
    in_order = (priority == priority[0]).all() if len(priority) else True
    has_room = limits[POLICY] == DECODE_FIRST and limits[MAX_RUNNING] < limits[MAX_STEP_TOKENS]
    if jump and in_order and has_room:
        arguments = (arrival_s, prompt, output, cached, shape, limits, rates, kx, ky, due_s)
        late = serve_in_order(*arguments, late_allowed, first_s, finish_s, counters, measured)
        if late != PREEMPTED:
            return late
        first_s[:] = finish_s[:] = 0.0
    requests = (arrival_s, prompt, output, cached, priority)
    engine = (shape, limits, rates, kx, ky)
    return simulate_any(*requests, *engine, jump, due_s, late_allowed, first_s, finish_s, counters, measured)


@numba.njit(cache=True, nogil=True)
def simulate_any(
    arrival_s: F,
    prompt: N,
    output: N,
    cached: N,
    priority: N,
    shape: N,
    limits: N,
    rates: F,
    kx: F,
    ky: F,
    jump: bool,
    due_s: F,
    late_allowed: int,
    first_s: F,
    finish_s: F,
    counters: F,
    measured: int,
) -> int:
    """simulate_replica with any priorities, policy and limits, preemptions included."""
    count, stages = len(arrival_s), shape[0]
    rank, in_order = np.arange(count), True
    for r in range(count):
        rank[r] -= priority[r] * PRIORITY_STEP
        in_order = in_order and priority[r] == priority[0]
    blocks, chunk = np.zeros(count, np.int64), np.zeros(count, np.int64)
    requests = Requests(prompt, output, rank, prompt.copy(), cached.copy(), blocks, chunk, first_s, finish_s)
    lanes = Lanes(
        np.zeros((stages, BATCH_COUNTS), np.int64),
        np.zeros((stages, count), np.int64),
        np.zeros((stages, count), np.int64),
        np.arange(stages),
        np.zeros(stages),
        np.zeros((stages, QUIET_COUNTS), np.int64),
        np.zeros(stages),
    )
    lanes.counts[:, FREE] = shape[1]
    ended = np.zeros(count, np.int64)
    engine = Engine(limits, rates, kx, ky)
    return _serve(arrival_s, requests, engine, lanes, ended, in_order, jump, due_s, late_allowed, counters, measured)


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def _serve(
    arrival_s: F,
    requests: Requests,
    engine: Engine,
    lanes: Lanes,
    ended: N,  # (N) room for the requests that end in a step
    in_order: bool,  # whether all are of one priority
    jump: bool,
    due_s: F,
    late_allowed: int,
    counters: F,
    measured: int,
) -> int:
    """simulate_any, with all memory at hand."""
    count, stages = len(arrival_s), len(lanes.upcoming)
    limits, rates, kx, ky = engine.limits, engine.rates, engine.kx, engine.ky
    length, computed, blocks = requests.length, requests.computed, requests.blocks
    upcoming, ready, quiet, quiet_base = lanes.upcoming, lanes.ready_s, lanes.quiet, lanes.quiet_s
    entry_free = 0.0
    last_exit = 0.0
    late = 0
    while True:
        # the lane that can go first
        lane, start = -1, np.inf
        for candidate in range(stages):
            if lanes.counts[candidate, RUNNING] + lanes.counts[candidate, WAITING] > 0:
                at = ready[candidate]
            elif upcoming[candidate] < count:
                at = max(ready[candidate], arrival_s[upcoming[candidate]])
            else:
                continue
            if at < start:
                lane, start = candidate, at
        if lane < 0 or late > late_allowed:
            return late
        start = max(start, entry_free)
        arrived = upcoming[lane] < count and arrival_s[upcoming[lane]] <= start
        # behind one that cannot start none can, unless it is of a higher priority
        watch_arrivals = lanes.counts[lane, WAITING] == 0 or not in_order
        if quiet[lane, LEFT] > 0 and not (arrived and watch_arrivals):
            n = lanes.counts[lane, RUNNING]
            a = quiet_base[lane] + rates[CONTEXT_S] * quiet[lane, CONTEXT] + rates[GAP_S] * quiet[lane, GAP]
            steps = 1
            took = a
            if stages == 1:
                steps = quiet[lane, LEFT]
                b = rates[CONTEXT_S] * n
                if watch_arrivals and upcoming[lane] < count:
                    steps = steps_until(arrival_s[upcoming[lane]] - start, a, b, steps)
                took = run_s(steps, a, b)
            quiet[lane, CONTEXT] += steps * n
            quiet[lane, LEFT] -= steps
            quiet[lane, DONE] += steps
            end = max(start + took, last_exit + took / stages)
            entry_free, last_exit, ready[lane] = start + took / stages, end, end
            counters[BUSY_S] += took / stages
            counters[STEPS] += steps
            counters[TOKENS] += steps * n
            continue
        counts, running, waiting = lanes.counts[lane], lanes.running[lane], lanes.waiting[lane]
        if quiet[lane, DONE] > 0:
            for i in range(counts[RUNNING]):
                r = running[i]
                length[r] += quiet[lane, DONE]
                computed[r] += quiet[lane, DONE]
                if computed[r] > blocks[r] * limits[BLOCK_TOKENS]:
                    needed = blocks_for(computed[r], limits[BLOCK_TOKENS]) - blocks[r]
                    blocks[r] += needed
                    counts[FREE] -= needed
            quiet[lane, DONE] = 0
        quiet[lane, LEFT] = 0
        while upcoming[lane] < count and arrival_s[upcoming[lane]] <= start:
            insert(waiting, counts, WAITING, upcoming[lane], requests.rank)
            upcoming[lane] += stages
        load, preemptions = plan_step(counts, running, waiting, requests, limits)
        took = step_s(load, engine)
        end = max(start + took, last_exit + took / stages)
        entry_free, last_exit, ready[lane] = start + took / stages, end, end
        counters[BUSY_S] += took / stages
        counters[STEPS] += 1
        counters[TOKENS] += load.tokens
        counters[PREEMPTIONS] += preemptions
        counters[PEAK_RUNNING] = max(counters[PEAK_RUNNING], counts[RUNNING])
        for i in range(commit(counts, running, requests, end, ended)):
            r = ended[i]
            late += measured_s(requests.first_s[r], end, requests.output[r], measured) >= due_s[r]
        if jump:
            following = quiet_steps(counts, running, waiting, requests, limits)
            quiet[lane, LEFT], quiet[lane, CONTEXT], quiet[lane, GAP] = following
            quiet_base[lane] = base_s(counts[RUNNING], kx, ky)


@numba.njit(cache=True, nogil=True)
def simulate_tier(
    arrival_s: F,  # (N) ascending
    prompt: N,  # (N)
    output: N,  # (N)
    cached: N,  # (N)
    priority: N,  # (N)
    owner: N,  # (N) the replica of each request
    kind: N,  # (R) the kind of each replica
    whole: N,  # (K, 6): stages, lane_blocks, block_tokens, max_running, max_step_tokens, policy
    rates: F,  # (K, 4): see batch_step
    kx: F,  # (K, knots), rows padded with their last knot going on
    ky: F,
    due_s: F,  # (N), see simulate_replica
    late_allowed: int,
    first_s: F,  # (N) out
    finish_s: F,  # (N) out
    counters: F,  # (COUNTERS) out
    measured: int,  # see simulate_replica
) -> bool:
    """All replicas of a tier, one after the other: they share nothing but the queue that was split among them.

    False where more are late than allowed; then it was given up.
    """
    count, replicas = len(arrival_s), len(kind)
    sizes = np.zeros(replicas + 1, np.int64)
    for r in range(count):
        sizes[owner[r] + 1] += 1
    ends = np.cumsum(sizes)
    place = ends[:-1].copy()
    rows = np.empty(count, np.int64)
    for r in range(count):
        rows[place[owner[r]]] = r
        place[owner[r]] += 1
    for one in range(replicas):
        own = rows[ends[one] : ends[one + 1]]
        if len(own) == 0:
            continue
        k = kind[one]
        first, finish = np.zeros(len(own)), np.zeros(len(own))
        late_allowed -= simulate_replica(
            arrival_s[own],
            prompt[own],
            output[own],
            cached[own],
            priority[own],
            whole[k, :2],
            whole[k, 2:],
            rates[k],
            kx[k],
            ky[k],
            True,
            due_s[own],
            late_allowed,
            first,
            finish,
            counters,
            measured,
        )
        if late_allowed < 0:
            return False
        first_s[own] = first
        finish_s[own] = finish
    return True


@numba.njit(cache=True, nogil=True)
def percentile_within(
    arrival_s: F,  # (N) ascending; what follows as in simulate_tier
    prompt: N,
    output: N,
    cached: N,
    priority: N,
    owner: N,
    kind: N,
    whole: N,
    rates: F,
    kx: F,
    ky: F,
    alone: F,  # (K, N) seconds of each request alone on each kind, of what is measured
    counted: B,  # (N) whether a request's latency counts; at least one does
    percentile: float,
    limit_s: float,
    measured: int,
) -> float:
    """The percentile of what is measured of a tier; infinity where it was given up because it is at limit_s or above.

    It is as soon as more requests are than may be. Those that are even when alone are known beforehand.
    """
    count = counted.sum()
    place = percentile / 100.0 * (count - 1)
    below = int(np.floor(place))
    late_allowed = count - below - 1
    due = np.full(len(arrival_s), np.inf)
    if limit_s < np.inf:
        for r in range(len(arrival_s)):
            if not counted[r]:
                continue
            if alone[kind[owner[r]], r] >= limit_s:
                late_allowed -= 1
            else:
                due[r] = limit_s if measured == PACE else arrival_s[r] + limit_s
        if late_allowed < 0:
            return np.inf
    first, finish, counters = np.zeros(len(arrival_s)), np.zeros(len(arrival_s)), np.zeros(COUNTERS)
    if not simulate_tier(
        arrival_s,
        prompt,
        output,
        cached,
        priority,
        owner,
        kind,
        whole,
        rates,
        kx,
        ky,
        due,
        late_allowed,
        first,
        finish,
        counters,
        measured,
    ):
        return np.inf
    if measured == FIRST_TOKEN:
        values = first - arrival_s
    elif measured == PACE:
        values = (finish - first) / np.maximum(1, output - 1)
    else:
        values = finish - arrival_s
    latency = np.sort(values[counted])
    if below == count - 1:
        return float(latency[below])
    return float(latency[below] + (latency[below + 1] - latency[below]) * (place - below))


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def alone_s(
    prompt: N,
    output: N,
    cached: N,
    max_step_tokens: int,
    kx: F,
    ky: F,
    context_token_s: float,
    pair_s: float,
    first_s: F,  # (N) out
    out_s: F,  # (N) out
) -> None:
    """Seconds from arrival to first and to last token of each request with a replica for itself.

    It computes its prompt by chunks, but for the tokens that are cached, then decodes.
    """
    one = base_s(1.0, kx, ky)
    for r in range(len(prompt)):
        total, done = 0.0, cached[r]
        while done < prompt[r]:
            c = min(max_step_tokens, prompt[r] - done)
            done += c
            pairs = 0.0 if prompt[r] - (done - c) == 1 else c * (done - c + 0.5 * (c + 1))
            total += base_s(c, kx, ky) + context_token_s * done + pair_s * pairs
        k = output[r] - 1
        first_s[r] = total
        out_s[r] = total + run_s(k, one + context_token_s * (prompt[r] + 1), context_token_s)
