"""A replica with prefill-first or decode-first batches whose tokens are judged by their SLOs, compiled. No I/O.

Its steps are those of `batch_step`, one at a time: a window of ten gaps needs the time of every token. The policies know
nothing of the SLOs, but for `drop_late`: a request whose first token is late already is given up, as a proxy with a timeout
in front of an engine does.
"""

import numba
import numpy as np
import numpy.typing as npt

from planner_service.simulator.attainment_kernel import Judgement, Slos, judge_token
from planner_service.simulator.batch_step import (
    BATCH_COUNTS,
    FREE,
    RUNNING,
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

GIVEN_UP = -1


@numba.njit(cache=True, nogil=True)
def serve_judged(
    arrival_s: F,  # (N) ascending
    prompt: N,  # (N) tokens that the request comes with
    output: N,  # (N) tokens still to come, at least 1
    computed: N,  # (N) of the prompt, tokens whose KV the request brings; consumed
    slos: Slos,  # of these N requests
    judgement: Judgement,  # of these N requests, as it was before; out
    engine: Engine,
    kv_blocks: int,
    drop_late: bool,
    misses_allowed: int,
    first_s: F,  # (N) out: when the first of these tokens came
    finish_s: F,  # (N) out: when the last came; 0 for requests that were dropped
) -> int:
    """Serve N requests, each of which fits the KV alone. Returns the steps, or GIVEN_UP once more requests missed."""
    count = len(arrival_s)
    blocks, chunk = np.zeros(count, np.int64), np.zeros(count, np.int64)
    requests = Requests(prompt, output, np.arange(count), prompt.copy(), computed, blocks, chunk, first_s, finish_s)
    counts = np.zeros(BATCH_COUNTS, np.int64)
    counts[FREE] = kv_blocks
    running, waiting, ended = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    arrived, steps, missed = 0, 0, 0
    now_s = 0.0
    while True:
        if counts[RUNNING] + counts[WAITING] == 0:
            if arrived == count:
                return steps
            now_s = max(now_s, arrival_s[arrived])
        while arrived < count and arrival_s[arrived] <= now_s:
            insert(waiting, counts, WAITING, arrived, requests.rank)
            arrived += 1
        if drop_late:
            for which in (RUNNING, WAITING):
                row = running if which == RUNNING else waiting
                i = 0
                while i < counts[which]:
                    r = row[i]
                    if judgement.tokens[r] == 0 and now_s >= slos.first_due_s[r]:
                        drop(row, counts, which, r)
                        counts[FREE] += blocks[r]
                        blocks[r] = 0
                        judgement.misses[r] += 1
                        missed += 1
                    else:
                        i += 1
            if counts[RUNNING] + counts[WAITING] == 0:
                continue
        load, _ = plan_step(counts, running, waiting, requests, engine.limits)
        end_s = now_s + step_s(load, engine)
        for i in range(counts[RUNNING]):
            r = running[i]
            if chunk[r] > 0 and computed[r] + chunk[r] == requests.length[r]:
                before = judgement.misses[r]
                last = requests.length[r] + 1 - prompt[r] >= output[r]
                judge_token(r, end_s, last, slos, judgement)
                missed += before == 0 and judgement.misses[r] > 0
        commit(counts, running, requests, end_s, ended)
        now_s = end_s
        steps += 1
        if missed > misses_allowed:
            return GIVEN_UP
