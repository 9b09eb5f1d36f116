"""One engine instance of a cluster in virtual time, step by step and open to moves, compiled. No I/O.

The worker's batch scheduler again, as in `kernel`, which runs a replica from its first request to its last in one call. Here
an instance can be stopped at any time, asked what it holds, and relieved of a sequence or given one: what a cluster needs
whose requests move. A property test holds it to `kernel`, step for step, where nothing moves.
"""

import numba
import numpy as np
import numpy.typing as npt

from planner_service.simulator.kernel import base_s

F = npt.NDArray[np.float64]
N = npt.NDArray[np.int64]

# per instance
RUNNING, WAITING, COMING, FREE, RANKS = range(5)
COUNTS = 5
# of the engine
BLOCK_TOKENS, MAX_RUNNING, MAX_STEP_TOKENS = range(3)
# of its steps
CONTEXT_S, PAIR_S, MIXED = range(3)


@numba.njit(cache=True)
def advance(
    until_s: float,
    counts: N,  # (COUNTS)
    running: N,  # (capacity) request numbers by rank
    waiting: N,  # (capacity) likewise
    coming: N,  # (capacity) in order of their time
    coming_s: F,  # (capacity) when they are there
    ready_s: F,  # (1) when the step under way ends
    limits: N,  # (3)
    rates: F,  # (3)
    kx: F,
    ky: F,
    prompt: N,  # (R), of all requests of the cluster, as are the rest
    output: N,
    length: N,  # prompt and output so far
    computed: N,
    blocks: N,
    chunk: N,
    rank: N,  # order in which requests came to this instance
    first_s: F,
    finish_s: F,
    ended: N,  # (capacity) out: requests that ended
) -> int:
    """Take every step that begins before until_s. Returns how many requests ended."""
    block, most_running, most_tokens = limits[BLOCK_TOKENS], limits[MAX_RUNNING], limits[MAX_STEP_TOKENS]
    n_ended = 0
    while True:
        start = ready_s[0]
        if counts[RUNNING] + counts[WAITING] == 0:
            if counts[COMING] == 0:
                return n_ended
            start = max(start, coming_s[0])
        if start >= until_s:
            return n_ended
        arrived = 0
        while arrived < counts[COMING] and coming_s[arrived] <= start:
            r = coming[arrived]
            rank[r] = counts[RANKS]
            counts[RANKS] += 1
            if computed[r] > 0 and counts[RUNNING] < most_running:  # moved here with its KV
                _insert(running, counts, RUNNING, r, rank)
            else:
                counts[FREE] += blocks[r]
                computed[r] = blocks[r] = 0
                _insert(waiting, counts, WAITING, r, rank)
            arrived += 1
        if arrived > 0:
            for i in range(arrived, counts[COMING]):
                coming[i - arrived], coming_s[i - arrived] = coming[i], coming_s[i]
            counts[COMING] -= arrived

        # plan: decodes, then prompts under way, then prompts that wait
        budget, preempted = most_tokens, False
        n_at_start = counts[RUNNING]
        order = running[:n_at_start].copy()
        decoding = np.empty(n_at_start, np.bool_)
        stays = np.ones(n_at_start, np.bool_)
        for i in range(n_at_start):
            decoding[i] = length[order[i]] - computed[order[i]] == 1
        for phase in range(2):
            for i in range(n_at_start):
                r = order[i]
                if budget <= 0 or not stays[i] or decoding[i] != (phase == 0):
                    continue
                want = min(1 if phase == 0 else budget, length[r] - computed[r])
                needed = -(-(computed[r] + want) // block) - blocks[r]
                given = True
                while needed > counts[FREE]:
                    victim = -1
                    for j in range(counts[RUNNING] - 1, -1, -1):
                        if chunk[running[j]] == 0:
                            victim = running[j]
                            break
                    if victim >= 0:
                        preempted = True
                        _drop(running, counts, RUNNING, victim)
                        for j in range(n_at_start):
                            if order[j] == victim:
                                stays[j] = False
                        counts[FREE] += blocks[victim]
                        blocks[victim] = computed[victim] = 0
                        _insert(waiting, counts, WAITING, victim, rank)
                    if victim < 0 or victim == r:
                        given = False
                        break
                if given:
                    if needed > 0:
                        blocks[r] += needed
                        counts[FREE] -= needed
                    chunk[r] = want
                    budget -= want
        while budget > 0 and counts[WAITING] > 0 and not preempted:
            r = waiting[0]
            if counts[RUNNING] >= most_running or -(-length[r] // block) > counts[FREE]:
                break
            _drop(waiting, counts, WAITING, r)
            _insert(running, counts, RUNNING, r, rank)
            want = min(budget, length[r])
            blocks[r] = -(-want // block)
            counts[FREE] -= blocks[r]
            chunk[r] = want
            budget -= want

        # time it
        tokens, context, pairs, longest, decodes, decode_context = 0, 0, 0.0, 0, 0, 0
        for i in range(counts[RUNNING]):
            r = running[i]
            c = chunk[r]
            if c == 0:
                continue
            tokens += c
            if length[r] - computed[r] == 1:
                decodes += 1
                decode_context += computed[r] + c
                longest = max(longest, computed[r] + c)
            else:
                context += computed[r] + c
                pairs += c * (computed[r] + 0.5 * (c + 1))
        took = 0.0
        if tokens > 0:
            unlike = 1.0 - decode_context / (decodes * longest) if decodes > 0 else 0.0
            attention = rates[CONTEXT_S] * (context + decode_context * (1.0 + rates[MIXED] * unlike))
            took = base_s(tokens, kx, ky) + attention + rates[PAIR_S] * pairs
        elif counts[COMING] > 0:  # nothing fits: KV is set aside for what is on its way
            took = max(coming_s[0] - start, 1e-9)
        else:
            took = max(until_s - start, 1e-9)
        end = start + took
        ready_s[0] = end

        # commit
        kept = 0
        for i in range(counts[RUNNING]):
            r = running[i]
            computed[r] += chunk[r]
            if chunk[r] > 0 and computed[r] == length[r]:
                if length[r] == prompt[r]:
                    first_s[r] = end
                length[r] += 1
            chunk[r] = 0
            if length[r] - prompt[r] >= output[r]:
                finish_s[r] = end
                counts[FREE] += blocks[r]
                blocks[r] = 0
                ended[n_ended] = r
                n_ended += 1
                continue
            running[kept] = r
            kept += 1
        counts[RUNNING] = kept


@numba.njit(cache=True)
def take_out(counts: N, running: N, r: int) -> None:
    """A running sequence leaves; its blocks are the caller's to free."""
    _drop(running, counts, RUNNING, r)


@numba.njit(cache=True)
def put_in(counts: N, coming: N, coming_s: F, r: int, at_s: float) -> None:
    """A request is there from at_s on."""
    i = counts[COMING]
    while i > 0 and coming_s[i - 1] > at_s:
        coming[i], coming_s[i] = coming[i - 1], coming_s[i - 1]
        i -= 1
    coming[i], coming_s[i] = r, at_s
    counts[COMING] += 1


@numba.njit(cache=True)
def _drop(row: N, counts: N, which: int, r: int) -> None:
    i = 0
    while row[i] != r:
        i += 1
    for j in range(i, counts[which] - 1):
        row[j] = row[j + 1]
    counts[which] -= 1


@numba.njit(cache=True)
def _insert(row: N, counts: N, which: int, r: int, rank: N) -> None:
    i = counts[which]
    while i > 0 and rank[row[i - 1]] > rank[r]:
        row[i] = row[i - 1]
        i -= 1
    row[i] = r
    counts[which] += 1
