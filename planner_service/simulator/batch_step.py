"""One step of the worker's batch scheduler, compiled: plan it, time it, commit it. No I/O.

The twin of `worker_service.scheduling.BatchScheduler` with the policies `DecodeFirst` and `PrefillFirst`. Three kernels run
it: `kernel` a replica from its first request to its last, `instance_kernel` an instance that can be stopped and relieved of
sequences, `judged_replica` a replica whose tokens are judged by their SLOs. Property tests drive the original next to it. It
keeps counts where the original keeps blocks and tokens. Of prefix reuse it has what a request finds in the cache when it
first starts, which is given; what KV is shared and evicted is not simulated.
"""

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

F = npt.NDArray[np.float64]
N = npt.NDArray[np.int64]

# counts of a batch
RUNNING, WAITING, FREE = range(3)  # requests, requests, KV blocks
BATCH_COUNTS = 3
# limits of an engine, and the policy of its batches
BLOCK_TOKENS, MAX_RUNNING, MAX_STEP_TOKENS, POLICY = range(4)
# of a simulated replica
BUSY_S, STEPS, PREEMPTIONS, TOKENS, PEAK_RUNNING = range(5)
COUNTERS = 5
LATENCY, FIRST_TOKEN, PACE = range(3)  # what is measured, see felt.Measured
# policies, see worker_service.scheduling.policies
DECODE_FIRST, PREFILL_FIRST = range(2)
# rates of its step times, see StepLatencyModel; MIXED: see cluster.Moves
CONTEXT_S, PAIR_S, GAP_S, MIXED = range(4)

WITHOUT_ALLOCATION = {"_nrt": False, "forceinline": True}
"""For numba.njit of functions that allocate nothing: their arrays are the caller's, and no references to them are counted.
Counting them, with atomic instructions at every call, took two thirds of a simulation."""

PRIORITY_STEP = 1 << 40  # ranks of one priority: more than requests ever come


class Requests(NamedTuple):
    """Requests of a simulation, by number: (R) each.

    rank: the lower goes first; of one priority the order of arrival. length: tokens of prompt and output so far; computed:
    those whose KV is there, of a request that waits those with which it will start. chunk: tokens in the current step.
    """

    prompt: N
    output: N
    rank: N
    length: N
    computed: N
    blocks: N
    chunk: N
    first_s: F
    finish_s: F


class Load(NamedTuple):
    """What one step computes, as StepLoad: tokens; context: that its requests attend to, new tokens included, summed;
    pairs: of prompts; decodes, with their context and the longest of it."""

    tokens: int
    context: int
    pairs: float
    decodes: int
    decode_context: int
    longest: int


class Engine(NamedTuple):
    """What limits and times the steps of a replica. limits (4), rates (4); kx, ky: knots of the base step time."""

    limits: N
    rates: F
    kx: F
    ky: F


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def base_s(tokens: float, kx: F, ky: F) -> float:
    """services.domain.latency.StepLatencyModel.base_s."""
    at = 1
    while at < len(kx) - 1 and kx[at] <= tokens:
        at += 1
    seconds: float = ky[at - 1] + (tokens - kx[at - 1]) * (ky[at] - ky[at - 1]) / (kx[at] - kx[at - 1])
    return max(0.0, seconds)


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def blocks_for(tokens: int, block_tokens: int) -> int:
    return (tokens + block_tokens - 1) // block_tokens


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def plan_step(counts: N, running: N, waiting: N, requests: Requests, limits: N) -> tuple[Load, int]:
    """Set the chunk of each request of the next step, by limits[POLICY].

    DECODE_FIRST: decodes, then running prompts, then prompts that wait. PREFILL_FIRST: prompts, those that wait included;
    decodes only in a step without a prompt. counts (BATCH_COUNTS and more); running, waiting: request numbers by rank.
    Returns what the step computes, and how many were preempted for room.
    """
    load, preemptions = Load(0, 0, 0.0, 0, 0, 0), 0
    prompts_first = limits[POLICY] == PREFILL_FIRST
    decodes, prompts = np.bool_(True), np.bool_(False)  # numba would compile the callee for each constant
    if not prompts_first:
        load, preemptions = _continue_running(decodes, load, preemptions, counts, running, waiting, requests, limits)
    if load.decodes < counts[RUNNING]:
        load, preemptions = _continue_running(prompts, load, preemptions, counts, running, waiting, requests, limits)
    if preemptions == 0:
        load = _start_waiting(load, counts, running, waiting, requests, limits)
    if prompts_first and load.tokens == 0:
        load, preemptions = _continue_running(decodes, load, preemptions, counts, running, waiting, requests, limits)
    return load, preemptions


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def _continue_running(
    decodes: bool,  # their turn; else the prompts'
    load: Load,
    preemptions: int,
    counts: N,
    running: N,
    waiting: N,
    requests: Requests,
    limits: N,
) -> tuple[Load, int]:
    """Set the chunks of the running requests whose turn it is; the load and the preemptions with theirs."""
    length, computed, blocks, chunk = requests.length, requests.computed, requests.blocks, requests.chunk
    block, budget = limits[BLOCK_TOKENS], limits[MAX_STEP_TOKENS] - load.tokens
    context, pairs, decode_context, longest, decoding = (
        load.context,
        load.pairs,
        load.decode_context,
        load.longest,
        load.decodes,
    )
    i = 0
    while i < counts[RUNNING] and budget > 0:
        r = running[i]
        pending = length[r] - computed[r]
        if (pending == 1) != decodes:
            i += 1
            continue
        want = min(pending, budget)
        end = computed[r] + want
        needed = blocks_for(end, block) - blocks[r] if end > blocks[r] * block else 0
        victim = -1
        while needed > counts[FREE] and victim != r:
            last = counts[RUNNING] - 1  # the victim is no earlier than r, which has no chunk yet
            while chunk[running[last]] > 0:
                last -= 1
            victim = running[last]
            preemptions += 1
            drop(running, counts, RUNNING, victim)
            counts[FREE] += blocks[victim]
            blocks[victim] = computed[victim] = 0
            insert(waiting, counts, WAITING, victim, requests.rank)
        if victim == r:
            continue  # it gave up its own place, which the next one has now
        if needed > 0:
            blocks[r] += needed
            counts[FREE] -= needed
        chunk[r] = want
        budget -= want
        context += end
        if decodes:
            decoding += 1
            decode_context += end
            longest = max(longest, end)
        else:
            pairs += want * (computed[r] + 0.5 * (want + 1))
        i += 1
    return Load(limits[MAX_STEP_TOKENS] - budget, context, pairs, decoding, decode_context, longest), preemptions


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def _start_waiting(load: Load, counts: N, running: N, waiting: N, requests: Requests, limits: N) -> Load:
    """Start those that wait, by rank, while there is room; the load with their chunks.

    A request may bring the KV of its first tokens (`computed`), as one does whose prompt was computed elsewhere, or begins
    like one that was computed here. All of its KV counts as its own.
    """
    length, computed = requests.length, requests.computed
    budget = limits[MAX_STEP_TOKENS] - load.tokens
    context, pairs, decode_context, longest, decodes = (
        load.context,
        load.pairs,
        load.decode_context,
        load.longest,
        load.decodes,
    )
    while budget > 0 and counts[WAITING] > 0:
        r = waiting[0]
        if not _can_start(r, counts, requests, limits):
            break
        drop(waiting, counts, WAITING, r)
        insert(running, counts, RUNNING, r, requests.rank)
        start = computed[r]
        want = min(budget, length[r] - start)
        requests.blocks[r] = blocks_for(start + want, limits[BLOCK_TOKENS])
        counts[FREE] -= requests.blocks[r]
        requests.chunk[r] = want
        budget -= want
        context += start + want
        if length[r] - start == 1:
            decodes += 1
            decode_context += start + 1
            longest = max(longest, start + 1)
        else:
            pairs += want * (start + 0.5 * (want + 1))
    return Load(limits[MAX_STEP_TOKENS] - budget, context, pairs, decodes, decode_context, longest)


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def _can_start(r: int, counts: N, requests: Requests, limits: N) -> bool:
    fits: bool = blocks_for(requests.length[r], limits[BLOCK_TOKENS]) <= counts[FREE]
    return fits and counts[RUNNING] < limits[MAX_RUNNING]


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def step_s(load: Load, engine: Engine) -> float:
    """Seconds that a step takes; 0 for an empty one. See StepLatencyModel.step_s."""
    if load.tokens == 0:
        return 0.0
    rates = engine.rates
    gap = load.longest * load.decodes - load.decode_context
    unlike = gap / (load.decodes * load.longest) if load.decodes > 0 else 0.0
    attention = rates[CONTEXT_S] * (load.context + load.decode_context * rates[MIXED] * unlike)
    return base_s(load.tokens, engine.kx, engine.ky) + attention + rates[PAIR_S] * load.pairs + rates[GAP_S] * gap


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def commit(counts: N, running: N, requests: Requests, end_s: float, ended: N) -> int:
    """The step ended at end_s: what reached its last token gets the next one, what has all its tokens leaves.

    ended: out, the requests that left; returns how many.
    """
    prompt, output, length, computed = requests.prompt, requests.output, requests.length, requests.computed
    blocks, chunk = requests.blocks, requests.chunk
    remaining, n_ended = 0, 0
    for i in range(counts[RUNNING]):
        r = running[i]
        computed[r] += chunk[r]
        if chunk[r] > 0 and computed[r] == length[r]:
            if length[r] == prompt[r]:
                requests.first_s[r] = end_s
            length[r] += 1
        chunk[r] = 0
        if length[r] - prompt[r] >= output[r]:
            requests.finish_s[r] = end_s
            counts[FREE] += blocks[r]
            blocks[r] = 0
            ended[n_ended] = r
            n_ended += 1
        else:
            running[remaining] = r
            remaining += 1
    counts[RUNNING] = remaining
    return n_ended


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def quiet_steps(counts: N, running: N, waiting: N, requests: Requests, limits: N) -> tuple[int, int, int]:
    """(steps that may follow in which only contexts grow, total context of their first, how much longer its longest is).

    Quiet: all running requests decode, none ends, none waits that could start, and no block is missing.
    """
    n = counts[RUNNING]
    if n == 0 or n > limits[MAX_STEP_TOKENS]:
        return 0, 0, 0
    starts = n < limits[MAX_STEP_TOKENS] or limits[POLICY] == PREFILL_FIRST
    if counts[WAITING] > 0 and starts and _can_start(waiting[0], counts, requests, limits):
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
    by_blocks = (counts[FREE] - n) * limits[BLOCK_TOKENS] // n
    return max(0, min(shortest - 1, by_blocks)), context, longest * n - context


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def run_s(k: int, a: float, b: float) -> float:
    """Seconds that k quiet steps take, the first a, each b longer than the one before."""
    return k * a + b * (0.5 * k * (k - 1))


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def steps_until(wait_s: float, a: float, b: float, most: int) -> int:
    """The fewest steps, of `most`, after which wait_s has passed; `most` if it has not."""
    if run_s(most, a, b) <= wait_s:
        return most
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if run_s(middle, a, b) >= wait_s:
            high = middle
        else:
            low = middle + 1
    return low


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def measured_s(first_s: float, end_s: float, output: int, measured: int) -> float:
    """What is measured of a request that ends: when its first token came, its pace over `output` tokens, or its end."""
    if measured == FIRST_TOKEN:
        return first_s
    if measured == PACE:
        return (end_s - first_s) / max(1, output - 1)
    return end_s


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def drop(row: N, counts: N, which: int, r: int) -> None:
    """Take request r out of a row of counts[which] request numbers, in which it is."""
    i = 0
    while row[i] != r:
        i += 1
    for j in range(i, counts[which] - 1):
        row[j] = row[j + 1]
    counts[which] -= 1


@numba.njit(cache=True, nogil=True, **WITHOUT_ALLOCATION)
def insert(row: N, counts: N, which: int, r: int, rank: N) -> None:
    """Put request r at its place by rank."""
    i = counts[which]
    while i > 0 and rank[row[i - 1]] > rank[r]:
        row[i] = row[i - 1]
        i -= 1
    row[i] = r
    counts[which] += 1
