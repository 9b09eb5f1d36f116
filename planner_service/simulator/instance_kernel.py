"""One engine instance of a cluster in virtual time, step by step and open to moves, compiled. No I/O.

Its steps are those of `batch_step`, as are those of `kernel`, which runs a replica from its first request to its last
in one call. Here an instance can be stopped at any time, asked what it holds, and relieved of a sequence or given one:
what a cluster needs whose requests move.
"""

import numba
import numpy as np
import numpy.typing as npt

from planner_service.simulator.batch_step import (
    BATCH_COUNTS,
    BUSY_S,
    FREE,
    MAX_RUNNING,
    PREEMPTIONS,
    PRIORITY_STEP,
    RUNNING,
    STEPS,
    WAITING,
    Engine,
    Requests,
    commit,
    drop,
    insert,
    plan_step,
    step_s,
)

F = npt.NDArray[np.float64]
N = npt.NDArray[np.int64]

COMING, ARRIVED = BATCH_COUNTS, BATCH_COUNTS + 1  # counts: on their way here; that have ever come
COUNTS = BATCH_COUNTS + 2
SHORTEST_WAIT_S = 1e-9  # an instance where nothing fits waits at least so long


@numba.njit(cache=True)
def advance(
    until_s: float,
    counts: N,  # (COUNTS)
    running: N,  # (capacity) request numbers by rank
    waiting: N,  # (capacity) likewise
    coming: N,  # (capacity) in order of their time
    coming_s: F,  # (capacity) when they are there
    ready_s: F,  # (1) when the current step ends
    engine: Engine,
    priority: N,  # (R) of all requests of the cluster
    requests: Requests,
    ended: N,  # (capacity) out: requests that ended
    counters: F,  # (COUNTERS) added to: BUSY_S, STEPS and PREEMPTIONS
) -> int:
    """Take every step that begins before until_s. Returns how many requests ended."""
    n_ended = 0
    while True:
        start = ready_s[0]
        if counts[RUNNING] + counts[WAITING] == 0:
            if counts[COMING] == 0:
                return n_ended
            start = max(start, coming_s[0])
        if start >= until_s:
            return n_ended
        _let_in(start, counts, running, waiting, coming, coming_s, engine, priority, requests)
        load, preempted = plan_step(counts, running, waiting, requests, engine.limits)
        took = step_s(load, engine)
        if load.tokens == 0:  # nothing fits: KV is set aside for what is on its way
            next_s = coming_s[0] if counts[COMING] > 0 else until_s
            took = max(next_s - start, SHORTEST_WAIT_S)
        else:
            counters[BUSY_S] += took
            counters[STEPS] += 1
        counters[PREEMPTIONS] += preempted
        ready_s[0] = start + took
        n_ended += commit(counts, running, requests, start + took, ended[n_ended:])


@numba.njit(cache=True)
def _let_in(
    start_s: float,
    counts: N,
    running: N,
    waiting: N,
    coming: N,
    coming_s: F,
    engine: Engine,
    priority: N,
    requests: Requests,
) -> None:
    """Those that are here by now join the queue, or the batch if they have moved here with their KV and there is a place.

    Those that moved hold blocks; those that have not started yet hold none, whatever of their prompts is cached.
    """
    arrived = 0
    while arrived < counts[COMING] and coming_s[arrived] <= start_s:
        r = coming[arrived]
        requests.rank[r] = counts[ARRIVED] - priority[r] * PRIORITY_STEP
        counts[ARRIVED] += 1
        if requests.blocks[r] > 0 and counts[RUNNING] < engine.limits[MAX_RUNNING]:
            insert(running, counts, RUNNING, r, requests.rank)
        else:
            if requests.blocks[r] > 0:
                counts[FREE] += requests.blocks[r]
                requests.computed[r] = requests.blocks[r] = 0
            insert(waiting, counts, WAITING, r, requests.rank)
        arrived += 1
    for i in range(arrived, counts[COMING]):
        coming[i - arrived], coming_s[i - arrived] = coming[i], coming_s[i]
    counts[COMING] -= arrived


@numba.njit(cache=True)
def remove(counts: N, running: N, waiting: N, coming: N, coming_s: F, requests: Requests, r: int, which: int) -> None:
    """Take a request out of the row `which` (RUNNING, WAITING or COMING) that it is in, and free its blocks here."""
    if which == RUNNING:
        drop(running, counts, RUNNING, r)
    elif which == WAITING:
        drop(waiting, counts, WAITING, r)
    else:
        i = 0
        while coming[i] != r:
            i += 1
        for j in range(i, counts[COMING] - 1):
            coming[j], coming_s[j] = coming[j + 1], coming_s[j + 1]
        counts[COMING] -= 1
    counts[FREE] += requests.blocks[r]
    requests.blocks[r] = 0


@numba.njit(cache=True)
def put_in(counts: N, coming: N, coming_s: F, r: int, at_s: float) -> None:
    """A request is there from at_s on."""
    i = counts[COMING]
    while i > 0 and coming_s[i - 1] > at_s:
        coming[i], coming_s[i] = coming[i - 1], coming_s[i - 1]
        i -= 1
    coming[i], coming_s[i] = r, at_s
    counts[COMING] += 1
