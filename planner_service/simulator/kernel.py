"""The worker's batch scheduler, compiled, on a latency model: one replica in virtual time. No I/O.

A twin of `worker_service.scheduling.BatchScheduler` without prefix reuse: it takes the same steps, to the last token; a
property test drives both. Two things make it fast. It keeps counts where the original keeps blocks and tokens. And while
nothing can change but contexts that grow (all decode, nobody ends, nobody can start), steps are *quiet*: step i of a run
takes a + b i, so k of them take k a + b k (k - 1) / 2, and a whole run up to the next arrival is one jump (with several
lanes, whose steps interleave, one addition per step).

Pipeline stages: a replica of `stages` stages runs as many batches at once, its lanes. Requests go to the lanes in turn and
each lane has its share of the KV. A step enters the first stage when that is free, takes step_s in all, and leaves no
sooner than one stage's time behind the step before it (the recurrence of a permutation flow shop).
"""

import numba
import numpy as np
import numpy.typing as npt

F = npt.NDArray[np.float64]
N = npt.NDArray[np.int64]

BUSY_S, STEPS, PREEMPTIONS, TOKENS, PEAK_RUNNING = range(5)
COUNTERS = 5


@numba.njit(cache=True)
def base_s(tokens: float, kx: F, ky: F) -> float:
    """services.domain.latency.StepLatencyModel.base_s."""
    at = 1
    while at < len(kx) - 1 and kx[at] <= tokens:
        at += 1
    found: float = ky[at - 1] + (tokens - kx[at - 1]) * (ky[at] - ky[at - 1]) / (kx[at] - kx[at - 1])
    return max(0.0, found)


@numba.njit(cache=True)
def simulate_replica(
    arrival_s: F,  # (N) ascending
    prompt: N,  # (N) tokens
    output: N,  # (N) tokens, at least 1
    stages: int,
    lane_blocks: int,
    block_tokens: int,
    max_running: int,
    max_step_tokens: int,
    kx: F,
    ky: F,
    context_token_s: float,
    pair_s: float,
    gap_s: float,
    quiet_steps: bool,
    due_s: F,  # (N) a request that ends then or later is late
    late_allowed: int,
    first_s: F,  # (N) out: when the first token came
    finish_s: F,  # (N) out: when the last came
    counters: F,  # (COUNTERS) out
) -> int:
    """Serve N requests; each must fit a lane's KV alone. max_running is a lane's. Returns how many were late.

    Gives up, with the rest of the outputs left as they were, once more are late than allowed.
    """
    count = len(arrival_s)
    length = prompt.copy()  # tokens that there are: prompt and output so far
    computed = np.zeros(count, np.int64)
    blocks = np.zeros(count, np.int64)
    chunk = np.zeros(count, np.int64)  # tokens in the step being made
    alive = np.zeros(count, np.bool_)  # runs
    free = np.full(stages, lane_blocks, np.int64)
    # per lane, rows of request numbers in order; a request's number is its place in the queue
    running = np.zeros((stages, count), np.int64)
    n_running = np.zeros(stages, np.int64)
    waiting = np.zeros((stages, count), np.int64)
    n_waiting = np.zeros(stages, np.int64)
    upcoming = np.arange(stages)  # the next request of each lane to arrive
    ready = np.zeros(stages)
    quiet = np.zeros(stages, np.int64)  # quiet steps that may still follow
    quiet_done = np.zeros(stages, np.int64)  # and that are not yet in length and computed
    quiet_context = np.zeros(stages, np.int64)
    quiet_gap = np.zeros(stages, np.int64)
    quiet_base = np.zeros(stages)
    entry_free = 0.0
    last_exit = 0.0
    late = 0
    while True:
        # the lane that can go first
        lane, start = -1, np.inf
        for candidate in range(stages):
            if n_running[candidate] + n_waiting[candidate] > 0:
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
        row = running[lane]
        line = waiting[lane]
        arrived = upcoming[lane] < count and arrival_s[upcoming[lane]] <= start
        if quiet[lane] > 0 and not (arrived and n_waiting[lane] == 0):
            n = n_running[lane]
            if stages == 1:
                a = quiet_base[lane] + context_token_s * quiet_context[lane] + gap_s * quiet_gap[lane]
                b = context_token_s * n
                k = quiet[lane]
                if n_waiting[lane] == 0 and upcoming[lane] < count:
                    k = min(k, _steps_until(arrival_s[upcoming[lane]] - start, a, b, k))
                took = _run_s(k, a, b)
                quiet_context[lane] += k * n
                quiet[lane] -= k
                quiet_done[lane] += k
                entry_free = last_exit = ready[lane] = start + took
                counters[BUSY_S] += took
                counters[STEPS] += k
                counters[TOKENS] += k * n
                continue
            took = quiet_base[lane] + context_token_s * quiet_context[lane] + gap_s * quiet_gap[lane]
            quiet_context[lane] += n
            quiet[lane] -= 1
            quiet_done[lane] += 1
            end = max(start + took, last_exit + took / stages)
            entry_free, last_exit, ready[lane] = start + took / stages, end, end
            counters[BUSY_S] += took / stages
            counters[STEPS] += 1
            counters[TOKENS] += n
            continue
        if quiet_done[lane] > 0:
            for i in range(n_running[lane]):
                r = row[i]
                length[r] += quiet_done[lane]
                computed[r] += quiet_done[lane]
                needed = -(-computed[r] // block_tokens) - blocks[r]
                blocks[r] += needed
                free[lane] -= needed
            quiet_done[lane] = 0
        quiet[lane] = 0
        while upcoming[lane] < count and arrival_s[upcoming[lane]] <= start:
            line[n_waiting[lane]] = upcoming[lane]  # arrives last: its number is the highest
            n_waiting[lane] += 1
            upcoming[lane] += stages

        # plan the step: decodes, then prompts under way, then prompts that wait
        budget = max_step_tokens
        preempted = False
        n_at_start = n_running[lane]
        order = row[:n_at_start].copy()
        decoding = np.empty(n_at_start, np.bool_)
        for i in range(n_at_start):
            decoding[i] = length[order[i]] - computed[order[i]] == 1
        for phase in range(2):
            for i in range(n_at_start):
                r = order[i]
                if budget <= 0 or not alive[r] or decoding[i] != (phase == 0):
                    continue
                want = min(1 if phase == 0 else budget, length[r] - computed[r])
                needed = -(-(computed[r] + want) // block_tokens) - blocks[r]
                given = True
                while needed > free[lane]:
                    victim = -1
                    for j in range(n_running[lane] - 1, -1, -1):
                        if chunk[row[j]] == 0:
                            victim = row[j]
                            break
                    if victim >= 0:
                        preempted = True
                        counters[PREEMPTIONS] += 1
                        _drop(row, n_running, lane, victim)
                        alive[victim] = False
                        free[lane] += blocks[victim]
                        blocks[victim] = 0
                        computed[victim] = 0
                        _insert(line, n_waiting, lane, victim)
                    if victim < 0 or victim == r:
                        given = False
                        break
                if given:
                    if needed > 0:
                        blocks[r] += needed
                        free[lane] -= needed
                    chunk[r] = want
                    budget -= want
        while budget > 0 and n_waiting[lane] > 0 and not preempted:
            r = line[0]
            if n_running[lane] >= max_running or -(-length[r] // block_tokens) > free[lane]:
                break
            _drop(line, n_waiting, lane, r)
            _insert(row, n_running, lane, r)
            alive[r] = True
            want = min(budget, length[r])
            needed = -(-want // block_tokens)
            blocks[r] = needed
            free[lane] -= needed
            chunk[r] = want
            budget -= want

        # time it
        tokens, context, pairs, longest, decodes, decode_context = 0, 0, 0.0, 0, 0, 0
        for i in range(n_running[lane]):
            r = row[i]
            c = chunk[r]
            if c == 0:
                continue
            tokens += c
            context += computed[r] + c
            if length[r] - computed[r] == 1:
                decodes += 1
                decode_context += computed[r] + c
                longest = max(longest, computed[r] + c)
            else:
                pairs += c * (computed[r] + 0.5 * (c + 1))
        gap = longest * decodes - decode_context
        took = (
            base_s(tokens, kx, ky) + (context_token_s * context + pair_s * pairs) + gap_s * gap if tokens > 0 else 0.0
        )
        end = max(start + took, last_exit + took / stages)
        entry_free, last_exit, ready[lane] = start + took / stages, end, end
        counters[BUSY_S] += took / stages
        counters[STEPS] += 1
        counters[TOKENS] += tokens
        counters[PEAK_RUNNING] = max(counters[PEAK_RUNNING], n_running[lane])

        # commit: what reached its last token gets the next one; what has all its tokens leaves
        kept = 0
        n = n_running[lane]
        shortest, all_decode, context, longest = np.int64(1 << 60), True, 0, 0
        for i in range(n):
            r = row[i]
            computed[r] += chunk[r]
            if chunk[r] > 0 and computed[r] == length[r]:
                if length[r] == prompt[r]:
                    first_s[r] = end
                length[r] += 1
            chunk[r] = 0
            if length[r] - prompt[r] >= output[r]:
                finish_s[r] = end
                late += end >= due_s[r]
                alive[r] = False
                free[lane] += blocks[r]
                blocks[r] = 0
                continue
            row[kept] = r
            kept += 1
            shortest = min(shortest, output[r] - (length[r] - prompt[r]))
            context += computed[r] + 1
            longest = max(longest, computed[r] + 1)
            if length[r] - computed[r] != 1 or length[r] == prompt[r]:
                all_decode = False
        n_running[lane] = kept
        if quiet_steps and kept > 0 and all_decode and kept <= max_step_tokens:
            head_waits = n_waiting[lane] > 0
            if head_waits:
                r = line[0]
                head_waits = kept < max_running and kept < max_step_tokens
                head_waits = head_waits and -(-length[r] // block_tokens) <= free[lane]
            if not head_waits:
                by_blocks = (free[lane] - kept) * block_tokens // kept
                quiet[lane] = max(0, min(shortest - 1, by_blocks))
                quiet_context[lane] = context
                quiet_gap[lane] = longest * kept - context
                quiet_base[lane] = base_s(kept, kx, ky)


@numba.njit(cache=True)
def simulate_tier(
    arrival_s: F,  # (N) ascending
    prompt: N,  # (N)
    output: N,  # (N)
    owner: N,  # (N) the replica of each request
    kind: N,  # (R) the kind of each replica
    whole: N,  # (K, 5): stages, lane_blocks, block_tokens, max_running, max_step_tokens
    rates: F,  # (K, 3): context_token_s, pair_s, gap_s
    kx: F,  # (K, knots), rows padded with their last knot going on
    ky: F,
    due_s: F,  # (N), see simulate_replica
    late_allowed: int,
    first_s: F,  # (N) out
    finish_s: F,  # (N) out
    counters: F,  # (COUNTERS) out
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
        mine = rows[ends[one] : ends[one + 1]]
        if len(mine) == 0:
            continue
        k = kind[one]
        first, finish = np.zeros(len(mine)), np.zeros(len(mine))
        late_allowed -= simulate_replica(
            arrival_s[mine],
            prompt[mine],
            output[mine],
            whole[k, 0],
            whole[k, 1],
            whole[k, 2],
            whole[k, 3],
            whole[k, 4],
            kx[k],
            ky[k],
            rates[k, 0],
            rates[k, 1],
            rates[k, 2],
            True,
            due_s[mine],
            late_allowed,
            first,
            finish,
            counters,
        )
        if late_allowed < 0:
            return False
        first_s[mine] = first
        finish_s[mine] = finish
    return True


@numba.njit(cache=True)
def percentile_within(
    arrival_s: F,  # (N) ascending; what follows as in simulate_tier
    prompt: N,
    output: N,
    owner: N,
    kind: N,
    whole: N,
    rates: F,
    kx: F,
    ky: F,
    alone: F,  # (K, N) seconds of each request alone on each kind
    percentile: float,
    limit_s: float,
) -> float:
    """The percentile of the latencies of a tier; infinity where it was given up because it is at limit_s or above.

    It is as soon as more requests are than may be. Those that are even when alone are known beforehand.
    """
    count = len(arrival_s)
    place = percentile / 100.0 * (count - 1)
    below = int(np.floor(place))
    late_allowed = count - below - 1
    due = np.full(count, np.inf)
    if limit_s < np.inf:
        for r in range(count):
            if alone[kind[owner[r]], r] >= limit_s:
                late_allowed -= 1
            else:
                due[r] = arrival_s[r] + limit_s
        if late_allowed < 0:
            return np.inf
    first, finish, counters = np.zeros(count), np.zeros(count), np.zeros(COUNTERS)
    if not simulate_tier(
        arrival_s, prompt, output, owner, kind, whole, rates, kx, ky, due, late_allowed, first, finish, counters
    ):
        return np.inf
    latency = np.sort(finish - arrival_s)
    if below == count - 1:
        return float(latency[below])
    return float(latency[below] + (latency[below + 1] - latency[below]) * (place - below))


@numba.njit(cache=True)
def single_estimates(
    sizes: N, capacity: F, alone_mean: F, rate_per_s: float, span_s: float, gpus: int, most: int
) -> tuple[N, F]:
    """((K) how many replicas of each kind go on `gpus`, at most `most`; (K) their estimates, infinite for none)."""
    counts, guesses = np.zeros(len(sizes), np.int64), np.full(len(sizes), np.inf)
    for k in range(len(sizes)):
        counts[k] = min(most, gpus // sizes[k])
        if counts[k] > 0:
            guesses[k] = estimate_s(counts[k], 0, capacity[k], 0.0, alone_mean[k], 0.0, rate_per_s, span_s)
    return counts, guesses


@numba.njit(cache=True)
def promising_pairs(
    sizes: N,  # (K) GPUs of each kind
    capacity: F,  # (K) requests per second
    alone_mean: F,  # (K) seconds
    rate_per_s: float,
    span_s: float,  # from the first arrival to the last
    gpus: int,
    most: int,
    keep: int,
) -> N:
    """The `keep` most promising multisets of two kinds that leave no room for one more replica: rows of (i, n, j, m).

    n and m: counts, m before it is cut to `most`. Ordered by estimate, ties by (i, j, n).
    """
    found, estimates, n_found = np.zeros((keep, 4), np.int64), np.full(keep, np.inf), 0
    for i in range(len(sizes)):
        for j in range(i + 1, len(sizes)):
            for n in range(1, min(most, (gpus - sizes[j]) // sizes[i]) + 1):
                left = gpus - n * sizes[i]
                if left % sizes[j] >= sizes[i]:
                    continue
                m = left // sizes[j]
                guess = estimate_s(n, m, capacity[i], capacity[j], alone_mean[i], alone_mean[j], rate_per_s, span_s)
                if n_found == keep and guess >= estimates[keep - 1]:
                    continue
                at = min(n_found, keep - 1)
                n_found = min(n_found + 1, keep)
                while at > 0 and estimates[at - 1] > guess:
                    estimates[at], found[at] = estimates[at - 1], found[at - 1]
                    at -= 1
                estimates[at] = guess
                found[at, 0], found[at, 1], found[at, 2], found[at, 3] = i, n, j, m
    return found[:n_found]


@numba.njit(cache=True)
def estimate_s(
    n: int,
    m: int,
    capacity_n: float,
    capacity_m: float,
    alone_n: float,
    alone_m: float,
    rate_per_s: float,
    span_s: float,
) -> float:
    """A guess to sort by: mean latency alone of n and m replicas, over the share of capacity that is left (at least a
    tenth), and the backlog that an overload has piled up by the end of the trace."""
    one, two = capacity_n * n, capacity_m * m
    total = one + two
    alone = (one * alone_n + two * alone_m) / total
    load = rate_per_s / total
    backlog_s = span_s * (1 - 1 / load) if load > 1 else 0.0
    guess: float = alone / max(1 - load, 0.1) + backlog_s
    return guess


@numba.njit(cache=True)
def _run_s(k: int, a: float, b: float) -> float:
    """Seconds that k quiet steps take, the first a, each b longer than the one before."""
    return k * a + b * (0.5 * k * (k - 1))


@numba.njit(cache=True)
def _steps_until(wait_s: float, a: float, b: float, most: int) -> int:
    """The fewest steps, of `most`, after which wait_s has passed; `most` if it has not."""
    if _run_s(most, a, b) <= wait_s:
        return most
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if _run_s(middle, a, b) >= wait_s:
            high = middle
        else:
            low = middle + 1
    return low


@numba.njit(cache=True)
def alone_s(
    prompt: N,
    output: N,
    max_step_tokens: int,
    kx: F,
    ky: F,
    context_token_s: float,
    pair_s: float,
    found: F,  # (N) out
) -> None:
    """Seconds from arrival to last token of each request with a replica for itself: prompt by chunks, then decodes."""
    one = base_s(1.0, kx, ky)
    for r in range(len(prompt)):
        total, done = 0.0, 0
        while done < prompt[r]:
            c = min(max_step_tokens, prompt[r] - done)
            done += c
            pairs = 0.0 if prompt[r] - (done - c) == 1 else c * (done - c + 0.5 * (c + 1))
            total += base_s(c, kx, ky) + context_token_s * done + pair_s * pairs
        k = output[r] - 1
        found[r] = total + _run_s(k, one + context_token_s * (prompt[r] + 1), context_token_s)


@numba.njit(cache=True)
def _drop(row: N, counts: N, lane: int, r: int) -> None:
    n = counts[lane]
    i = 0
    while row[i] != r:
        i += 1
    for j in range(i, n - 1):
        row[j] = row[j + 1]
    counts[lane] = n - 1


@numba.njit(cache=True)
def _insert(row: N, counts: N, lane: int, r: int) -> None:
    i = counts[lane]
    while i > 0 and row[i - 1] > r:
        row[i] = row[i - 1]
        i -= 1
    row[i] = r
    counts[lane] += 1
