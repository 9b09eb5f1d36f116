"""A replica in virtual time as long as no request is preempted and all have one priority, compiled. No I/O.

The steps are those of `batch_step` with decodes first, to the last bit; `kernel` explains quiet steps and lanes. Three
facts spare most steps a walk through their batch:

- Every decoding request of a lane gets one token per step. So the lane counts its steps; a request has the count at which it
  ends, and its context less the count. Sums over the batch are updated, not computed again.
- Requests start in the order of arrival. So the queue of a lane is a range of request numbers, and only the last request
  that started can have a prompt that is computed in part.
- A request with c computed tokens holds ceil(c / block) blocks, at most (c + block - 1) / block. The sum of this bound says
  whether a request fits. Only where it does not, blocks are counted request by request.
"""

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from planner_service.simulator.batch_step import (
    BLOCK_TOKENS,
    BUSY_S,
    CONTEXT_S,
    GAP_S,
    MAX_RUNNING,
    MAX_STEP_TOKENS,
    PEAK_RUNNING,
    STEPS,
    TOKENS,
    WITHOUT_ALLOCATION,
    Engine,
    Load,
    base_s,
    blocks_for,
    measured_s,
    run_s,
    step_s,
    steps_until,
)

F = npt.NDArray[np.float64]
N = npt.NDArray[np.int64]

PREEMPTED = -1

# Of a lane. DECODING: requests. COUNT: its steps with any of them so far. CONTEXT: their computed tokens, summed. LONGEST:
# the most computed tokens of one, less COUNT. NEXT_END: the COUNT at which the first of them ends. HEAD: the next request to
# start. UPCOMING: the next to arrive. DONE: computed tokens of HEAD's prompt, with those that were cached; 0 until it starts.
# LEFT: quiet steps that may still follow.
DECODING, COUNT, CONTEXT, LONGEST, NEXT_END, HEAD, UPCOMING, DONE, LEFT = range(9)
LANE_COUNTS = 9
NEVER = 1 << 60


class Batches(NamedTuple):
    """The L lanes of a replica, over R requests.

    counts (L, LANE_COUNTS). Of each decoding request: request (L, R) its number, end (L, R) the COUNT at which it ends,
    context (L, R) its computed tokens less COUNT. ready_s (L): when the step of a lane ends. quiet_s (L): the base time of
    its quiet steps.
    """

    counts: N
    request: N
    end: N
    context: N
    ready_s: F
    quiet_s: F


@numba.njit(cache=True, nogil=True)
def serve_in_order(
    arrival_s: F,  # (N) ascending; what follows as in kernel.simulate_replica
    prompt: N,
    output: N,
    cached: N,
    shape: N,
    limits: N,
    rates: F,
    kx: F,
    ky: F,
    due_s: F,
    late_allowed: int,
    first_s: F,
    finish_s: F,
    counters: F,
    measured: int,
) -> int:
    """As kernel.simulate_replica; PREEMPTED where a request would be preempted: then all outputs but counters are void.

    A step has to have room for a token of every running request and one more: limits[MAX_RUNNING] < limits[MAX_STEP_TOKENS].
    """
    count, stages = len(arrival_s), shape[0]
    rows = np.empty((3, stages, count), np.int64)
    counts = np.zeros((stages, LANE_COUNTS), np.int64)
    batches = Batches(counts, rows[0], rows[1], rows[2], np.zeros(stages), np.zeros(stages))
    for lane in range(stages):
        counts[lane, HEAD] = counts[lane, UPCOMING] = lane
        counts[lane, NEXT_END] = NEVER
    before = counters.copy()
    engine = Engine(limits, rates, kx, ky)
    requests = (arrival_s, prompt, output, cached, due_s, first_s, finish_s)
    late = _serve(*requests, shape[1], engine, batches, late_allowed, counters, measured)
    if late == PREEMPTED:
        counters[:] = before
    return late


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def _serve(
    arrival_s: F,
    prompt: N,
    output: N,
    cached: N,
    due_s: F,
    first_s: F,
    finish_s: F,
    blocks: int,
    engine: Engine,
    batches: Batches,
    late_allowed: int,
    counters: F,
    measured: int,
) -> int:
    """serve_in_order, with all memory at hand."""
    limits, rates, ready, quiet_s = engine.limits, engine.rates, batches.ready_s, batches.quiet_s
    count, stages = len(arrival_s), len(ready)
    block, max_running, max_tokens = limits[BLOCK_TOKENS], limits[MAX_RUNNING], limits[MAX_STEP_TOKENS]
    entry_free = last_exit = 0.0
    late = 0
    while True:
        # the lane that can go first
        lane, start = -1, np.inf
        for candidate in range(stages):
            each = batches.counts[candidate]
            if each[DECODING] > 0 or each[HEAD] < each[UPCOMING]:
                at = ready[candidate]
            elif each[UPCOMING] < count:
                at = max(ready[candidate], arrival_s[each[UPCOMING]])
            else:
                continue
            if at < start:
                lane, start = candidate, at
        if lane < 0 or late > late_allowed:
            return late
        start = max(start, entry_free)
        counts = batches.counts[lane]
        n, upcoming = counts[DECODING], counts[UPCOMING]
        # behind one that cannot start none can
        next_s = arrival_s[upcoming] if upcoming < count and counts[HEAD] == upcoming else np.inf
        if counts[LEFT] > 0 and next_s > start:
            context, gap = counts[CONTEXT] + n, (counts[LONGEST] + counts[COUNT]) * n - counts[CONTEXT]
            took = quiet_s[lane] + rates[CONTEXT_S] * context + rates[GAP_S] * gap
            steps = 1
            if stages == 1:
                steps = counts[LEFT]
                b = rates[CONTEXT_S] * n
                if next_s < np.inf:
                    steps = steps_until(next_s - start, took, b, steps)
                took = run_s(steps, took, b)
            counts[COUNT] += steps
            counts[CONTEXT] += steps * n
            counts[LEFT] -= steps
            end = max(start + took, last_exit + took / stages)
            entry_free, last_exit, ready[lane] = start + took / stages, end, end
            counters[BUSY_S] += took / stages
            counters[STEPS] += steps
            counters[TOKENS] += steps * n
            continue
        while upcoming < count and arrival_s[upcoming] <= start:
            upcoming += stages
        counts[UPCOMING] = upcoming
        # plan: a token of each that decodes, then prompts
        head, done = counts[HEAD], counts[DONE]
        context = decode_context = counts[CONTEXT] + n
        longest = counts[LONGEST] + counts[COUNT] + 1 if n > 0 else 0
        decodes, pairs, budget, running = n, 0.0, max_tokens - n, n + (done > 0)
        held, exact = (counts[CONTEXT] + n * block) // block, False  # blocks, at most: with a new one for each
        if held + blocks_for(done, block) > blocks:
            held, exact = _held(batches, lane, n, counts[COUNT] + 1, block), True
            if held + blocks_for(done, block) > blocks:
                return PREEMPTED
        while budget > 0 and head < upcoming:
            if done > 0:
                needed = blocks_for(done + min(budget, prompt[head] - done), block)
            else:
                needed = blocks_for(prompt[head], block)
                if running >= max_running:
                    break
            if held + needed > blocks:
                if not exact:
                    held += _held(batches, lane, n, counts[COUNT] + 1, block) - (counts[CONTEXT] + n * block) // block
                    exact = True
                if held + needed > blocks:
                    if done > 0:
                        return PREEMPTED
                    break
            if done == 0:
                running += 1
                done = cached[head]
            want = min(budget, prompt[head] - done)
            held += blocks_for(done + want, block)
            budget -= want
            context += done + want
            if prompt[head] - done == 1:
                decodes += 1
                decode_context += done + 1
                longest = max(longest, done + 1)
            else:
                pairs += want * (done + 0.5 * (want + 1))
            done += want
            if done < prompt[head]:
                break
            head, done = head + stages, 0
        took = step_s(Load(max_tokens - budget, context, pairs, decodes, decode_context, longest), engine)
        end = max(start + took, last_exit + took / stages)
        entry_free, last_exit, ready[lane] = start + took / stages, end, end
        counters[BUSY_S] += took / stages
        counters[STEPS] += 1
        counters[TOKENS] += max_tokens - budget
        counters[PEAK_RUNNING] = max(counters[PEAK_RUNNING], running)
        # commit
        if n > 0:
            counts[COUNT] += 1
            counts[CONTEXT] += n
            if counts[NEXT_END] == counts[COUNT]:
                late += _end(batches, lane, output, due_s, first_s, finish_s, end, measured)
        for r in range(counts[HEAD], head, stages):
            first_s[r] = end
            if output[r] == 1:
                finish_s[r] = end
                late += measured_s(first_s[r], end, output[r], measured) >= due_s[r]
                continue
            n = counts[DECODING]
            ends = counts[COUNT] + output[r] - 1
            batches.request[lane, n], batches.end[lane, n] = r, ends
            batches.context[lane, n] = prompt[r] - counts[COUNT]
            counts[NEXT_END] = min(counts[NEXT_END], ends)
            counts[LONGEST] = max(counts[LONGEST], prompt[r] - counts[COUNT]) if n > 0 else prompt[r] - counts[COUNT]
            counts[CONTEXT] += prompt[r]
            counts[DECODING] = n + 1
        counts[HEAD], counts[DONE] = head, done
        counts[LEFT] = _quiet_steps(batches, lane, prompt, blocks, limits)
        if counts[LEFT] > 0:
            quiet_s[lane] = base_s(counts[DECODING], engine.kx, engine.ky)


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def _end(batches: Batches, lane: int, output: N, due_s: F, first_s: F, finish_s: F, end_s: float, measured: int) -> int:
    """Take those that have all their tokens out of the batch; how many of them are late."""
    counts, request, ends = batches.counts[lane], batches.request[lane], batches.end[lane]
    context, count = batches.context[lane], counts[COUNT]
    late, remaining, next_end, longest = 0, 0, NEVER, -NEVER
    for i in range(counts[DECODING]):
        r = request[i]
        if ends[i] == count:
            finish_s[r] = end_s
            late += measured_s(first_s[r], end_s, output[r], measured) >= due_s[r]
            counts[CONTEXT] -= context[i] + count
        else:
            next_end, longest = min(next_end, ends[i]), max(longest, context[i])
            request[remaining], ends[remaining], context[remaining] = r, ends[i], context[i]
            remaining += 1
    counts[DECODING], counts[NEXT_END], counts[LONGEST] = remaining, next_end, longest
    return late


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def _held(batches: Batches, lane: int, n: int, count: int, block: int) -> int:
    """The blocks that the requests of a batch hold, which decode, when the lane has made `count` steps."""
    held, context = 0, batches.context[lane]
    for i in range(n):
        held += blocks_for(context[i] + count, block)
    return held


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def _quiet_steps(batches: Batches, lane: int, prompt: N, blocks: int, limits: N) -> int:
    """See batch_step.quiet_steps."""
    counts, block = batches.counts[lane], limits[BLOCK_TOKENS]
    n = counts[DECODING]
    if n == 0 or counts[DONE] > 0:
        return 0
    waits, quiet = counts[HEAD] < counts[UPCOMING], counts[NEXT_END] - counts[COUNT] - 1
    free = blocks - (counts[CONTEXT] + n * (block - 1)) // block  # at least
    starts = waits and n < limits[MAX_RUNNING]
    if starts and blocks_for(prompt[counts[HEAD]], block) <= free:
        return 0
    if starts or (free - n) * block // n < quiet:
        free = blocks - _held(batches, lane, n, counts[COUNT], block)
        if starts and blocks_for(prompt[counts[HEAD]], block) <= free:
            return 0
    return max(0, min(quiet, (free - n) * block // n))
