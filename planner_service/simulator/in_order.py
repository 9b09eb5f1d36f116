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

import numpy as np

from penstock.planner_service.simulator.batch_step import (
    BUSY_S,
    NO_LOAD,
    STEPS,
    TOKENS,
    Engine,
    Lateness,
    Outcome,
    StepWork,
    blocks_for,
    measured_s,
    step_s,
    with_chunk,
)
from penstock.planner_service.simulator.quiet import quiet_s
from penstock.planner_service.simulator.workload import Arrivals
from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import F, N, base_s

PREEMPTED = -1

# Of a lane. DECODING: requests. COUNT: its steps with any of them so far. CONTEXT: their computed tokens, summed. LONGEST:
# the most computed tokens of one, less COUNT. NEXT_END: the COUNT at which the first of them ends. HEAD: the next request to
# start. UPCOMING: the next to arrive. DONE: computed tokens of HEAD's prompt, with those that were cached; 0 until it starts.
# LEFT: quiet steps that may still follow.
DECODING, COUNT, CONTEXT, LONGEST, NEXT_END, HEAD, UPCOMING, DONE, LEFT = range(9)
LANE_COUNTS = 9
NEVER = 1 << 60


class Lanes(NamedTuple):
    """The L lanes of a replica, over R requests.

    counts (L, LANE_COUNTS). Of each decoding request: request (L, R) its number, end (L, R) the COUNT at which it ends,
    context (L, R) its computed tokens less COUNT. ready_s (L): when the step of a lane ends. base_s (L): the base time of
    its quiet steps.
    """

    counts: N
    request: N
    end: N
    context: N
    ready_s: F
    base_s: F


class Prompts(NamedTuple):
    """A step with prompts. head, done: HEAD and DONE of its lane afterwards. preempts: one would be preempted, so that the
    step is void."""

    load: StepWork
    head: int
    done: int
    preempts: bool


@compiled()
def serve_in_order(arrivals: Arrivals, engine: Engine, lateness: Lateness, out: Outcome) -> int:
    """As kernel.simulate_replica; PREEMPTED where a request would be preempted: then all outputs but counters are void.

    A step has to have room for a token of every running request and one more: max_running < max_step_tokens.
    """
    count, stages = len(arrivals.arrival_s), engine.stages
    rows = np.empty((3, stages, count), np.int64)
    counts = np.zeros((stages, LANE_COUNTS), np.int64)
    lanes = Lanes(counts, rows[0], rows[1], rows[2], np.zeros(stages), np.zeros(stages))
    for lane in range(stages):
        counts[lane, HEAD] = counts[lane, UPCOMING] = lane
        counts[lane, NEXT_END] = NEVER
    before = out.counters.copy()
    late = _serve(arrivals, engine, lanes, lateness, out)
    if late == PREEMPTED:
        for counter in range(len(before)):  # numba takes seconds to compile an assignment of a whole array
            out.counters[counter] = before[counter]
    return late


@compiled(allocates=False)
def _serve(arrivals: Arrivals, engine: Engine, lanes: Lanes, lateness: Lateness, out: Outcome) -> int:
    """serve_in_order, with all memory at hand."""
    arrival_s, counters = arrivals.arrival_s, out.counters
    count, stages = len(arrival_s), engine.stages
    entry_free = last_exit = 0.0
    late = 0
    while True:
        lane, start = _first_lane(arrival_s, lanes, stages)
        if lane < 0 or late > lateness.allowed:
            return late
        start = max(start, entry_free)
        counts = lanes.counts[lane]
        n, upcoming = counts[DECODING], counts[UPCOMING]
        # after one that cannot start none can
        next_s = arrival_s[upcoming] if upcoming < count and counts[HEAD] == upcoming else np.inf
        quiet = counts[LEFT] > 0 and next_s > start
        if quiet:
            context, gap = counts[CONTEXT] + n, (counts[LONGEST] + counts[COUNT]) * n - counts[CONTEXT]
            took = lanes.base_s[lane] + engine.context_token_s * context + engine.gap_s * gap
            steps, took = quiet_s(start, next_s, counts[LEFT], took, n, engine)
            counts[COUNT] += steps
            counts[CONTEXT] += steps * n
            counts[LEFT] -= steps
            tokens, plan = steps * n, Prompts(NO_LOAD, 0, 0, False)
        else:
            while upcoming < count and arrival_s[upcoming] <= start:
                upcoming += stages
            counts[UPCOMING] = upcoming
            plan = _plan(arrivals, engine, lanes, lane)
            if plan.preempts:
                return PREEMPTED
            steps, took, tokens = 1, step_s(plan.load, engine), plan.load.tokens
        end = max(start + took, last_exit + took / stages)
        entry_free, last_exit, lanes.ready_s[lane] = start + took / stages, end, end
        counters[BUSY_S] += took / stages
        counters[STEPS] += steps
        counters[TOKENS] += tokens
        if not quiet:
            late += _commit(arrivals, engine, lanes, lane, plan, end, lateness, out)


@compiled(allocates=False)
def _first_lane(arrival_s: F, lanes: Lanes, stages: int) -> tuple[int, float]:
    """The lane that can take a step first, and when; -1 for none."""
    lane, start = -1, np.inf
    for candidate in range(stages):
        counts, at = lanes.counts[candidate], lanes.ready_s[candidate]
        if counts[DECODING] == 0 and counts[HEAD] >= counts[UPCOMING]:
            if counts[UPCOMING] >= len(arrival_s):
                continue
            at = max(at, arrival_s[counts[UPCOMING]])
        if at < start:
            lane, start = candidate, at
    return lane, start


@compiled(allocates=False)
def _plan(arrivals: Arrivals, engine: Engine, lanes: Lanes, lane: int) -> Prompts:
    """A token of each that decodes, then prompts."""
    prompt, counts, block, blocks = arrivals.prompt, lanes.counts[lane], engine.block_tokens, engine.blocks
    n, head, done = counts[DECODING], counts[HEAD], counts[DONE]
    context = counts[CONTEXT] + n
    load = StepWork(n, context, 0.0, n, context, counts[LONGEST] + counts[COUNT] + 1 if n > 0 else 0, 0, 0)
    running, preempts = n + (done > 0), False
    held, exact = (counts[CONTEXT] + n * block) // block, False  # blocks, at most: with a new one for each
    if held + blocks_for(done, block) > blocks:
        held, exact = _held(lanes, lane, n, counts[COUNT] + 1, block), True
        preempts = held + blocks_for(done, block) > blocks
    while load.tokens < engine.max_step_tokens and head < counts[UPCOMING] and not preempts:
        budget, starts = engine.max_step_tokens - load.tokens, done == 0
        if done > 0:
            needed = blocks_for(done + min(budget, prompt[head] - done), block)
        elif running >= engine.max_running:
            break
        else:
            needed = blocks_for(prompt[head], block)
        if held + needed > blocks and not exact:
            held += _held(lanes, lane, n, counts[COUNT] + 1, block) - (counts[CONTEXT] + n * block) // block
            exact = True
        if held + needed > blocks:
            preempts = done > 0
            break
        if starts:
            running += 1
            done = arrivals.cached[head]
        want = min(budget, prompt[head] - done)
        held += blocks_for(done + want, block)
        load = with_chunk(load, done, want, prompt[head] - done == 1, int(starts))
        done += want
        if done < prompt[head]:
            break
        head, done = head + engine.stages, 0
    return Prompts(load, head, done, preempts)


@compiled(allocates=False)
def _commit(
    arrivals: Arrivals,
    engine: Engine,
    lanes: Lanes,
    lane: int,
    plan: Prompts,
    end_s: float,
    lateness: Lateness,
    out: Outcome,
) -> int:
    """A step has ended: complete prompts decode, those that have all their tokens leave; how many are late."""
    counts, prompt, output, late = lanes.counts[lane], arrivals.prompt, arrivals.output, 0
    if counts[DECODING] > 0:
        counts[COUNT] += 1
        counts[CONTEXT] += counts[DECODING]
        if counts[NEXT_END] == counts[COUNT]:
            late += _end(lanes, lane, output, lateness, out, end_s)
    for r in range(counts[HEAD], plan.head, engine.stages):
        out.first_s[r] = end_s
        if output[r] == 1:
            out.finish_s[r] = end_s
            late += measured_s(end_s, end_s, output[r], lateness.measured) >= lateness.due_s[r]
            continue
        n = counts[DECODING]
        ends = counts[COUNT] + output[r] - 1
        lanes.request[lane, n], lanes.end[lane, n] = r, ends
        lanes.context[lane, n] = prompt[r] - counts[COUNT]
        counts[NEXT_END] = min(counts[NEXT_END], ends)
        counts[LONGEST] = max(counts[LONGEST], prompt[r] - counts[COUNT]) if n > 0 else prompt[r] - counts[COUNT]
        counts[CONTEXT] += prompt[r]
        counts[DECODING] = n + 1
    counts[HEAD], counts[DONE] = plan.head, plan.done
    counts[LEFT] = _quiet_steps(lanes, lane, prompt, engine)
    if counts[LEFT] > 0:
        lanes.base_s[lane] = base_s(counts[DECODING], engine)
    return late


@compiled(allocates=False)
def _end(lanes: Lanes, lane: int, output: N, lateness: Lateness, out: Outcome, end_s: float) -> int:
    """Take those that have all their tokens out of the batch; how many of them are late."""
    counts, request, ends = lanes.counts[lane], lanes.request[lane], lanes.end[lane]
    context, count = lanes.context[lane], counts[COUNT]
    late, remaining, next_end, longest = 0, 0, NEVER, -NEVER
    for i in range(counts[DECODING]):
        r = request[i]
        if ends[i] == count:
            out.finish_s[r] = end_s
            late += measured_s(out.first_s[r], end_s, output[r], lateness.measured) >= lateness.due_s[r]
            counts[CONTEXT] -= context[i] + count
        else:
            next_end, longest = min(next_end, ends[i]), max(longest, context[i])
            request[remaining], ends[remaining], context[remaining] = r, ends[i], context[i]
            remaining += 1
    counts[DECODING], counts[NEXT_END], counts[LONGEST] = remaining, next_end, longest
    return late


@compiled(allocates=False)
def _held(lanes: Lanes, lane: int, n: int, count: int, block: int) -> int:
    """The blocks that the requests of a lane hold, which decode, when the lane has made `count` steps."""
    held, context = 0, lanes.context[lane]
    for i in range(n):
        held += blocks_for(context[i] + count, block)
    return held


@compiled(allocates=False)
def _quiet_steps(lanes: Lanes, lane: int, prompt: N, engine: Engine) -> int:
    """See kernel._quiet_steps."""
    counts, block, blocks = lanes.counts[lane], engine.block_tokens, engine.blocks
    n = counts[DECODING]
    if n == 0 or counts[DONE] > 0:
        return 0
    waits, quiet = counts[HEAD] < counts[UPCOMING], counts[NEXT_END] - counts[COUNT] - 1
    free = blocks - (counts[CONTEXT] + n * (block - 1)) // block  # at least
    starts = waits and n < engine.max_running
    if starts and blocks_for(prompt[counts[HEAD]], block) <= free:
        return 0
    if starts or (free - n) * block // n < quiet:
        free = blocks - _held(lanes, lane, n, counts[COUNT], block)
        if starts and blocks_for(prompt[counts[HEAD]], block) <= free:
            return 0
    return max(0, min(quiet, (free - n) * block // n))
