"""A replica from its first request to its last in virtual time, compiled. No I/O.

Its steps are those of `batch_step`. What makes it fast: while nothing can change but contexts that grow (all decode,
no request ends, none can start), steps are *quiet*, and a whole run of them up to the next arrival is one jump
(`quiet.quiet_s`).

Pipeline stages: a replica of S stages runs as many batches at once, its lanes. Requests go to the lanes in turn and each
lane has its share of the KV. A step enters the first stage when that is free, takes step_s in all, and leaves no sooner than
one stage's time after the step before it (the recurrence of a permutation flow shop):

    exit[k] = max(start[k] + took[k], exit[k - 1] + took[k] / S),   start[k] >= start[k - 1] + took[k - 1] / S.

Prefix reuse: a request starts with the KV of its cached tokens. It counts as its own KV, whole, though others may share it;
and after a preemption all of its tokens are computed again.

Where all requests have one priority, `in_order` takes the same steps in less time, unless a request would be preempted.
"""

from typing import NamedTuple

import numpy as np

from penstock.planner_service.simulator.batch_step import (
    BATCH_COUNTS,
    BUSY_S,
    COUNTERS,
    DECODE_FIRST,
    FREE,
    PACE,
    PREEMPTIONS,
    PREFILL_FIRST,
    PRIORITY_STEP,
    ROWS,
    RUNNING,
    STEPS,
    TOKENS,
    WAITING,
    Batch,
    Engine,
    Lateness,
    Outcome,
    Requests,
    blocks_for,
    can_start,
    commit,
    insert,
    measured_s,
    new_requests,
    plan_step,
    step_s,
    with_cpu_s,
)
from penstock.planner_service.simulator.in_order import PREEMPTED, serve_in_order
from penstock.planner_service.simulator.quiet import decodes_s, quiet_s
from penstock.planner_service.simulator.workload import Arrivals, Bools
from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import F, N, base_s

# of a lane: quiet steps that may still follow; those that are not yet in length and computed; the context of the next one,
# and how much longer its longest is
LEFT, DONE, CONTEXT, GAP = range(4)
QUIET_COUNTS = 4


class Lanes(NamedTuple):
    """The L lanes of a replica with their batches, over R requests.

    counts (L, BATCH_COUNTS), rows (L, ROWS, R): of the batches. upcoming (L): the next request of each to arrive.
    ready_s (L): when its step ends. quiet (L, QUIET_COUNTS), and base_s (L): the base time of its quiet steps. ended (R):
    those that a step ended.
    """

    counts: N
    rows: N
    upcoming: N
    ready_s: F
    quiet: N
    base_s: F
    ended: N


class Tier(NamedTuple):
    """R replicas of K kinds. owner (N): the replica of each request. kind (R): of each replica.

    Of each kind, as in Engine: whole (K, 7), its whole numbers; rates (K, 7); knot_tokens and knot_s (K, knots), rows
    filled up with their last piece continued.
    """

    owner: N
    kind: N
    whole: N
    rates: F
    knot_tokens: F
    knot_s: F


@compiled()
def simulate_replica(arrivals: Arrivals, engine: Engine, jump: bool, lateness: Lateness, out: Outcome) -> int:
    """Serve N requests; each must fit a lane's KV alone. jump: over quiet steps. Returns how many were late.

    Gives up, with the rest of the outputs left as they were, once more are late than allowed.
    """
    priority = arrivals.priority
    in_order = (priority == priority[0]).all() if len(priority) else True
    has_room = engine.policy == DECODE_FIRST and engine.max_running < engine.max_step_tokens
    if jump and in_order and has_room:
        late = serve_in_order(arrivals, engine, lateness, out)
        if late != PREEMPTED:
            return late
        out.first_s[:] = out.finish_s[:] = 0.0
    return simulate_any(arrivals, engine, jump, lateness, out)


@compiled()
def simulate_any(arrivals: Arrivals, engine: Engine, jump: bool, lateness: Lateness, out: Outcome) -> int:
    """simulate_replica with any priorities, policy and limits, preemptions included."""
    priority, stages, count = arrivals.priority, engine.stages, len(arrivals.prompt)
    rank, in_order = np.arange(count), True
    for r in range(count):
        rank[r] -= priority[r] * PRIORITY_STEP
        in_order = in_order and priority[r] == priority[0]
    requests = new_requests(arrivals, rank, out.first_s, out.finish_s)
    counts, rows = np.zeros((stages, BATCH_COUNTS), np.int64), np.zeros((stages, ROWS, count), np.int64)
    counts[:, FREE] = engine.blocks
    quiet, ended = np.zeros((stages, QUIET_COUNTS), np.int64), np.zeros(count, np.int64)
    lanes = Lanes(counts, rows, np.arange(stages), np.zeros(stages), quiet, np.zeros(stages), ended)
    return _serve(arrivals.arrival_s, requests, engine, lanes, in_order, jump, lateness, out.counters)


@compiled(allocates=False)
def _serve(
    arrival_s: F,
    requests: Requests,
    engine: Engine,
    lanes: Lanes,
    in_order: bool,  # whether all are of one priority
    jump: bool,
    lateness: Lateness,
    counters: F,
) -> int:
    """simulate_any, with all memory at hand."""
    count, stages, upcoming = len(arrival_s), engine.stages, lanes.upcoming
    entry_free = last_exit = 0.0
    late = 0
    while True:
        lane, start = _first_lane(arrival_s, lanes, stages)
        if lane < 0 or late > lateness.allowed:
            return late
        start = max(start, entry_free)
        batch, quiet = Batch(lanes.counts[lane], lanes.rows[lane]), lanes.quiet[lane]
        # after one that cannot start none can, unless it is of a higher priority
        watched = upcoming[lane] < count and (batch.counts[WAITING] == 0 or not in_order)
        next_s = arrival_s[upcoming[lane]] if watched else np.inf
        is_quiet = quiet[LEFT] > 0 and next_s > start
        if is_quiet:
            n = batch.counts[RUNNING]
            first_s = lanes.base_s[lane] + engine.context_token_s * quiet[CONTEXT] + engine.gap_s * quiet[GAP]
            steps, took = quiet_s(start, next_s, quiet[LEFT], first_s, n, engine)
            tokens = steps * n
            quiet[CONTEXT] += tokens
            quiet[LEFT] -= steps
            quiet[DONE] += steps
        else:
            _catch_up(batch, requests, engine, quiet)
            while upcoming[lane] < count and arrival_s[upcoming[lane]] <= start:
                insert(batch, WAITING, upcoming[lane], requests.rank)
                upcoming[lane] += stages
            load, preemptions = plan_step(batch, requests, engine)
            steps, took, tokens = 1, step_s(load, engine), load.tokens
            counters[PREEMPTIONS] += preemptions
        end = max(start + took, last_exit + took / stages)
        entry_free, last_exit, lanes.ready_s[lane] = start + took / stages, end, end
        counters[BUSY_S] += took / stages
        counters[STEPS] += steps
        counters[TOKENS] += tokens
        if is_quiet:
            continue
        for i in range(commit(batch, requests, end, lanes.ended)):
            r = lanes.ended[i]
            took = measured_s(requests.first_s[r], end, requests.output[r], lateness.measured)
            late += took >= lateness.due_s[r]
        if jump:
            quiet[LEFT], quiet[CONTEXT], quiet[GAP] = _quiet_steps(batch, requests, engine)
            lanes.base_s[lane] = base_s(batch.counts[RUNNING], engine)


@compiled(allocates=False)
def _first_lane(arrival_s: F, lanes: Lanes, stages: int) -> tuple[int, float]:
    """The lane that can take a step first, and when; -1 for none."""
    lane, start = -1, np.inf
    for candidate in range(stages):
        at, upcoming = lanes.ready_s[candidate], lanes.upcoming[candidate]
        if lanes.counts[candidate, RUNNING] + lanes.counts[candidate, WAITING] == 0:
            if upcoming >= len(arrival_s):
                continue
            at = max(at, arrival_s[upcoming])
        if at < start:
            lane, start = candidate, at
    return lane, start


@compiled(allocates=False)
def _catch_up(batch: Batch, requests: Requests, engine: Engine, quiet: N) -> None:
    """Quiet steps are over: give the running requests the tokens and blocks of those that were jumped over."""
    length, computed, blocks, counts = requests.length, requests.computed, requests.blocks, batch.counts
    if quiet[DONE] > 0:
        for i in range(counts[RUNNING]):
            r = batch.rows[RUNNING, i]
            length[r] += quiet[DONE]
            computed[r] += quiet[DONE]
            if computed[r] > blocks[r] * engine.block_tokens:
                needed = blocks_for(computed[r], engine.block_tokens) - blocks[r]
                blocks[r] += needed
                counts[FREE] -= needed
    quiet[DONE] = quiet[LEFT] = 0


@compiled(allocates=False)
def _quiet_steps(batch: Batch, requests: Requests, engine: Engine) -> tuple[int, int, int]:
    """(steps that may follow in which only contexts grow, total context of their first, how much longer its longest is).

    Quiet: all running requests decode, none ends, none waits that could start, and no block is missing.
    """
    counts, running = batch.counts, batch.rows[RUNNING]
    n = counts[RUNNING]
    if n == 0 or n > engine.max_step_tokens:
        return 0, 0, 0
    starts = n < engine.max_step_tokens or engine.policy == PREFILL_FIRST
    if starts and can_start(batch, requests, engine):
        return 0, 0, 0
    shortest, context, longest = np.int64(1 << 60), 0, 0
    length, prompt, output, computed = requests.length, requests.prompt, requests.output, requests.computed
    for i in range(n):
        r = running[i]
        produced = length[r] - prompt[r]
        if length[r] - computed[r] != 1 or produced == 0:
            return 0, 0, 0
        shortest = min(shortest, output[r] - produced)
        context += computed[r] + 1
        longest = max(longest, computed[r] + 1)
    by_blocks = (counts[FREE] - n) * engine.block_tokens // n
    return max(0, min(shortest - 1, by_blocks)), context, longest * n - context


@compiled()
def simulate_tier(arrivals: Arrivals, tier: Tier, lateness: Lateness, out: Outcome) -> bool:
    """All replicas of a tier, one after the other: they share nothing but the queue that was split among them.

    False where more are late than allowed; then it was given up.
    """
    owner, count, replicas = tier.owner, len(tier.owner), len(tier.kind)
    sizes = np.zeros(replicas + 1, np.int64)
    for r in range(count):
        sizes[owner[r] + 1] += 1
    ends = np.cumsum(sizes)
    place = ends[:-1].copy()
    rows = np.empty(count, np.int64)
    for r in range(count):
        rows[place[owner[r]]] = r
        place[owner[r]] += 1
    allowed = lateness.allowed
    for one in range(replicas):
        own = rows[ends[one] : ends[one + 1]]
        if len(own) == 0:
            continue
        requests = Arrivals(
            arrivals.arrival_s[own],
            arrivals.prompt[own],
            arrivals.output[own],
            arrivals.cached[own],
            arrivals.priority[own],
        )
        received = Outcome(np.zeros(len(own)), np.zeros(len(own)), out.counters)
        due = Lateness(lateness.due_s[own], allowed, lateness.measured)
        allowed -= simulate_replica(requests, _engine(tier, tier.kind[one]), True, due, received)
        if allowed < 0:
            return False
        out.first_s[own] = received.first_s
        out.finish_s[own] = received.finish_s
    return True


@compiled()
def _engine(tier: Tier, kind: int) -> Engine:
    whole, rates = tier.whole[kind], tier.rates[kind]
    return Engine(
        whole[0],
        whole[1],
        whole[2],
        whole[3],
        whole[4],
        whole[5],
        whole[6] > 0,
        rates[0],
        rates[1],
        rates[2],
        rates[3],
        rates[4],
        rates[5],
        rates[6],
        tier.knot_tokens[kind],
        tier.knot_s[kind],
    )


@compiled()
def percentile_within(
    arrivals: Arrivals, tier: Tier, alone: F, counted: Bools, percentile: float, limit_s: float, measured: int
) -> float:
    """The percentile of what is measured of a tier; infinity where it was given up because it is at limit_s or above.

    alone (K, N): what is measured of each request alone on each kind. counted (N): whether it counts; at least one does.
    It is as soon as more requests are than may be. Those that are even when alone are known beforehand.
    """
    arrival_s, requests = arrivals.arrival_s, len(arrivals.arrival_s)
    count = counted.sum()
    place = percentile / 100.0 * (count - 1)
    below = int(np.floor(place))
    late_allowed = count - below - 1
    due = np.full(requests, np.inf)
    for r in range(requests):
        if not counted[r]:
            continue
        if alone[tier.kind[tier.owner[r]], r] >= limit_s:
            late_allowed -= 1
        else:
            due[r] = limit_s if measured == PACE else arrival_s[r] + limit_s
    if late_allowed < 0:
        return np.inf
    out = Outcome(np.zeros(requests), np.zeros(requests), np.zeros(COUNTERS))
    if not simulate_tier(arrivals, tier, Lateness(due, late_allowed, measured), out):
        return np.inf
    values = np.empty(requests)
    for r in range(requests):
        value_s = measured_s(out.first_s[r], out.finish_s[r], arrivals.output[r], measured)
        values[r] = value_s if measured == PACE else value_s - arrival_s[r]
    latency = np.sort(values[counted])
    if below == count - 1:
        return float(latency[below])
    return float(latency[below] + (latency[below + 1] - latency[below]) * (place - below))


@compiled(allocates=False)
def alone_s(arrivals: Arrivals, engine: Engine, first_s: F, finish_s: F) -> None:
    """Seconds from arrival to first and to last token of each request with a replica for itself: first_s, finish_s (N) out.

    It computes its prompt by chunks, but for the tokens that are cached, then decodes.
    """
    prompt, one = arrivals.prompt, base_s(1.0, engine)
    for r in range(len(prompt)):
        total, done = 0.0, arrivals.cached[r]
        while done < prompt[r]:
            c = min(engine.max_step_tokens, prompt[r] - done)
            done += c
            pairs = 0.0 if prompt[r] - (done - c) == 1 else c * (done - c + 0.5 * (c + 1))
            gpu_s = base_s(c, engine) + engine.context_token_s * done + engine.pair_s * pairs
            total += with_cpu_s(gpu_s, 1, done == arrivals.cached[r] + c, engine)
        first_s[r] = total
        first_decode_s = one + engine.context_token_s * (prompt[r] + 1)
        finish_s[r] = total + decodes_s(arrivals.output[r] - 1, first_decode_s, engine)


@compiled()
def take_turns(share: F, owner: N) -> None:
    """Smooth weighted round robin: turn i of replica r is at (i + 1/2) / share[r], ties by replica. owner (N): out.

    Neighbours of equal share take each turn together: the turns of such groups are merged, not those of replicas.
    """
    replicas, count = len(share), len(owner)
    begin, groups = np.zeros(replicas + 1, np.int64), 0
    for r in range(replicas):
        if r == 0 or share[r] != share[r - 1]:
            begin[groups] = r
            groups += 1
    begin[groups] = replicas
    turn, at = np.zeros(groups, np.int64), np.zeros(groups)
    turns = np.zeros(groups, np.int64)  # that a replica takes at most
    for g in range(groups):
        at[g] = 0.5 / share[begin[g]]
        turns[g] = int(np.ceil(share[begin[g]] * count)) + 1
    done = 0
    while done < count:
        first = 0
        for g in range(1, groups):
            if at[g] < at[first]:
                first = g
        for r in range(begin[first], min(begin[first + 1], begin[first] + count - done)):
            owner[done] = r
            done += 1
        turn[first] += 1
        at[first] = (turn[first] + 0.5) / share[begin[first]] if turn[first] < turns[first] else np.inf
