"""One step of the worker's batch scheduler, compiled: plan it, time it, commit it. No I/O.

The compiled version of `worker_service.scheduling.BatchScheduler` with the policies `DecodeFirst` and `PrefillFirst`.
Three kernels run it: `kernel` a replica from its first request to its last, `instance_kernel` an instance that can be
stopped and relieved of sequences, `benchmarks.judged_replica` one whose tokens are judged by their SLOs. Property tests
drive the original next to it. It keeps counts where the original keeps blocks and tokens. Of prefix reuse it has what a
request finds in the cache when it first starts, which is given; what KV is shared and evicted is not simulated.
"""

from typing import NamedTuple

import numpy as np

from penstock.planner_service.simulator.workload import Arrivals
from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import F, N, base_s

# counts of a batch: requests that run, wait, or are on their way to an instance of a cluster; KV blocks
RUNNING, WAITING, COMING, FREE = range(4)
BATCH_COUNTS = 4
ROWS = 2  # RUNNING and WAITING
# of a simulated replica
BUSY_S, STEPS, PREEMPTIONS, TOKENS = range(4)
COUNTERS = 4
LATENCY, FIRST_TOKEN, PACE = range(3)  # what is measured, see felt.Measured
# policies, see worker_service.scheduling.policies
DECODE_FIRST, PREFILL_FIRST = range(2)

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


class StepWork(NamedTuple):
    """What one step computes, as StepLoad: tokens; context: that its requests attend to, new tokens included, summed;
    pairs: of prompts; decodes, with their context and the longest of it; chunks: of prompts; starts: requests that start."""

    tokens: int
    context: int
    pairs: float
    decodes: int
    decode_context: int
    longest: int
    chunks: int
    starts: int


NO_LOAD = StepWork(0, 0, 0.0, 0, 0, 0, 0, 0)


@compiled()
def new_requests(arrivals: Arrivals, rank: N, first_s: F, finish_s: F) -> Requests:
    """Requests that have not begun."""
    blocks, chunk = np.zeros_like(rank), np.zeros_like(rank)
    prompt, cached = arrivals.prompt, arrivals.cached
    return Requests(prompt, arrivals.output, rank, prompt.copy(), cached.copy(), blocks, chunk, first_s, finish_s)


@compiled(allocates=False)
def with_chunk(load: StepWork, start: int, tokens: int, decodes: bool, starts: int) -> StepWork:
    """The load and a chunk of so many tokens from position `start` on: a decode's one token, or a part of a prompt."""
    end = start + tokens
    total, context, started = load.tokens + tokens, load.context + end, load.starts + starts
    if decodes:
        longest = max(load.longest, end)
        decode_context = load.decode_context + end
        return StepWork(total, context, load.pairs, load.decodes + 1, decode_context, longest, load.chunks, started)
    pairs = load.pairs + tokens * (start + 0.5 * (tokens + 1))
    return StepWork(total, context, pairs, load.decodes, load.decode_context, load.longest, load.chunks + 1, started)


class Engine(NamedTuple):
    """What limits and times the steps of a replica. stages: its lanes; blocks: of KV, that each of them has.

    policy: of its batches. knot_tokens, knot_s and all rates: of StepLatencyModel. mixed: see cluster.Moves. overlapped,
    cpu_s, cpu_request_s, cpu_prompt_s: of EngineCpu.
    """

    stages: int
    blocks: int
    block_tokens: int
    max_running: int
    max_step_tokens: int
    policy: int
    overlapped: bool
    context_token_s: float
    pair_s: float
    gap_s: float
    mixed: float
    cpu_s: float
    cpu_request_s: float
    cpu_prompt_s: float
    knot_tokens: F
    knot_s: F


class Batch(NamedTuple):
    """counts (BATCH_COUNTS or more). rows (ROWS or more, capacity): the numbers of counts[RUNNING] and of counts[WAITING]
    requests, by rank."""

    counts: N
    rows: N


class Outcome(NamedTuple):
    """What N requests received: when the first and the last token came, (N) each; and counters (COUNTERS) of the replica."""

    first_s: F
    finish_s: F
    counters: F


class Lateness(NamedTuple):
    """When to give up: once more than `allowed` requests are late. due_s (N): a request is, if what is `measured` of it is
    that or more."""

    due_s: F
    allowed: int
    measured: int


@compiled(allocates=False)
def blocks_for(tokens: int, block_tokens: int) -> int:
    return (tokens + block_tokens - 1) // block_tokens


@compiled(allocates=False)
def plan_step(batch: Batch, requests: Requests, engine: Engine) -> tuple[StepWork, int]:
    """Set the chunk of each request of the next step, by the engine's policy.

    DECODE_FIRST: decodes, then running prompts, then prompts that wait. PREFILL_FIRST: prompts, those that wait included;
    decodes only in a step without a prompt. Returns what the step computes, and how many were preempted for room.
    """
    load, preemptions = NO_LOAD, 0
    prompts_first = engine.policy == PREFILL_FIRST
    decodes, prompts = np.bool_(True), np.bool_(False)  # numba would compile the callee for each constant
    if not prompts_first:
        load, preemptions = _continue_running(decodes, load, preemptions, batch, requests, engine)
    if load.decodes < batch.counts[RUNNING]:
        load, preemptions = _continue_running(prompts, load, preemptions, batch, requests, engine)
    if preemptions == 0:
        load = _start_waiting(load, batch, requests, engine)
    if prompts_first and load.tokens == 0:
        load, preemptions = _continue_running(decodes, load, preemptions, batch, requests, engine)
    return load, preemptions


@compiled(allocates=False)
def _continue_running(
    decodes: bool | np.bool_, load: StepWork, preemptions: int, batch: Batch, requests: Requests, engine: Engine
) -> tuple[StepWork, int]:
    """Set the chunks of the running requests whose turn it is, decodes' or prompts'; the load and preemptions with theirs."""
    length, computed, blocks, chunk = requests.length, requests.computed, requests.blocks, requests.chunk
    counts, running = batch.counts, batch.rows[RUNNING]
    block, budget = engine.block_tokens, engine.max_step_tokens - load.tokens
    context, pairs, decoding, chunks = load.context, load.pairs, load.decodes, load.chunks
    decode_context, longest = load.decode_context, load.longest
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
            victim = _preempt_last(batch, requests)
            preemptions += 1
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
            chunks += 1
            pairs += want * (computed[r] + 0.5 * (want + 1))
        i += 1
    tokens = engine.max_step_tokens - budget
    return StepWork(tokens, context, pairs, decoding, decode_context, longest, chunks, load.starts), preemptions


@compiled(allocates=False)
def _preempt_last(batch: Batch, requests: Requests) -> int:
    """Free the blocks of the last running request that has no chunk yet; it waits again, and is returned."""
    counts, running = batch.counts, batch.rows[RUNNING]
    last = counts[RUNNING] - 1
    while requests.chunk[running[last]] > 0:
        last -= 1
    victim = running[last]
    drop(batch, RUNNING, victim)
    counts[FREE] += requests.blocks[victim]
    requests.blocks[victim] = requests.computed[victim] = 0
    insert(batch, WAITING, victim, requests.rank)
    return victim


@compiled(allocates=False)
def _start_waiting(load: StepWork, batch: Batch, requests: Requests, engine: Engine) -> StepWork:
    """Start those that wait, by rank, while there is room; the load with their chunks.

    A request may bring the KV of its first tokens (`computed`), as one does whose prompt was computed elsewhere, or begins
    like one that was computed here. All of its KV counts as its own.
    """
    counts, waiting = batch.counts, batch.rows[WAITING]
    while load.tokens < engine.max_step_tokens and can_start(batch, requests, engine):
        r = waiting[0]
        drop(batch, WAITING, r)
        insert(batch, RUNNING, r, requests.rank)
        start, pending = requests.computed[r], requests.length[r] - requests.computed[r]
        want = min(engine.max_step_tokens - load.tokens, pending)
        requests.blocks[r] = blocks_for(start + want, engine.block_tokens)
        counts[FREE] -= requests.blocks[r]
        requests.chunk[r] = want
        load = with_chunk(load, start, want, pending == 1, 1)
    return load


@compiled(allocates=False)
def can_start(batch: Batch, requests: Requests, engine: Engine) -> bool:
    """Whether a request waits, and there is room for it."""
    counts = batch.counts
    if counts[WAITING] == 0 or counts[RUNNING] >= engine.max_running:
        return False
    fits: bool = blocks_for(requests.length[batch.rows[WAITING, 0]], engine.block_tokens) <= counts[FREE]
    return fits


@compiled(allocates=False)
def step_s(load: StepWork, engine: Engine) -> float:
    """Seconds that a step takes; 0 for an empty one. See StepLatencyModel.step_s."""
    if load.tokens == 0:
        return 0.0
    gap = load.longest * load.decodes - load.decode_context
    unlike = gap / (load.decodes * load.longest) if load.decodes > 0 else 0.0
    attention = engine.context_token_s * (load.context + load.decode_context * engine.mixed * unlike)
    gpu_s = base_s(load.tokens, engine) + attention + engine.pair_s * load.pairs + engine.gap_s * gap
    return with_cpu_s(gpu_s, load.decodes + load.chunks, load.starts, engine)


@compiled(allocates=False)
def with_cpu_s(gpu_s: float, requests: int, starts: int, engine: Engine) -> float:
    """See EngineCpu.step_with."""
    cpu_s = engine.cpu_s + engine.cpu_request_s * requests + engine.cpu_prompt_s * starts
    return max(gpu_s, cpu_s) if engine.overlapped else gpu_s + cpu_s


@compiled(allocates=False)
def commit(batch: Batch, requests: Requests, end_s: float, ended: N) -> int:
    """The step ended at end_s: what reached its last token gets the next one, what has all its tokens leaves.

    ended: out, the requests that left; returns how many.
    """
    prompt, output, length, computed = requests.prompt, requests.output, requests.length, requests.computed
    blocks, chunk = requests.blocks, requests.chunk
    counts, running = batch.counts, batch.rows[RUNNING]
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


@compiled(allocates=False)
def measured_s(first_s: float, end_s: float, output: int, measured: int) -> float:
    """What is measured of a request that ends: when its first token came, its pace over `output` tokens, or its end."""
    if measured == FIRST_TOKEN:
        return first_s
    if measured == PACE:
        return (end_s - first_s) / max(1, output - 1)
    return end_s


@compiled(allocates=False)
def drop(batch: Batch, which: int, r: int) -> None:
    """Take request r out of a row, in which it is."""
    row, i = batch.rows[which], 0
    while row[i] != r:
        i += 1
    for j in range(i, batch.counts[which] - 1):
        row[j] = row[j + 1]
    batch.counts[which] -= 1


@compiled(allocates=False)
def insert(batch: Batch, which: int, r: int, rank: N) -> None:
    """Put request r into a row, at its place by rank."""
    row, i = batch.rows[which], batch.counts[which]
    while i > 0 and rank[row[i - 1]] > rank[r]:
        row[i] = row[i - 1]
        i -= 1
    row[i] = r
    batch.counts[which] += 1
