"""A replica with prefill-first or decode-first batches whose tokens are judged by their SLOs, compiled. No I/O.

Its steps are those of `batch_step`, one at a time: a window of ten gaps needs the time of every token. The policies know
nothing of the SLOs, but for `drop_late`: a request whose first token is late already is given up, as a proxy with a timeout
in front of an engine does.
"""

import numpy as np

from penstock.planner_service.simulator.attainment_kernel import Judgement, Slos, judge_token
from penstock.planner_service.simulator.batch_step import (
    BATCH_COUNTS,
    FREE,
    ROWS,
    RUNNING,
    WAITING,
    Batch,
    Engine,
    Outcome,
    Requests,
    commit,
    drop,
    insert,
    plan_step,
    step_s,
)
from penstock.planner_service.simulator.workload import Arrivals
from penstock.services.compilation import compiled

GIVEN_UP = -1


@compiled()
def serve_judged(
    arrivals: Arrivals,  # `cached`: of the prompt, tokens whose KV the request brings
    slos: Slos,  # of these N requests
    judgement: Judgement,  # of these N requests, as it was before; out
    engine: Engine,
    drop_late: bool,
    misses_allowed: int,
    out: Outcome,  # finish_s: 0 for requests that were dropped
) -> int:
    """Serve N requests, each of which fits the KV alone. Returns the steps, or GIVEN_UP once more requests missed."""
    arrival_s, prompt, count = arrivals.arrival_s, arrivals.prompt, len(arrivals.prompt)
    blocks, chunk, computed = np.zeros(count, np.int64), np.zeros(count, np.int64), arrivals.cached.copy()
    length, rank = prompt.copy(), np.arange(count)
    requests = Requests(prompt, arrivals.output, rank, length, computed, blocks, chunk, out.first_s, out.finish_s)
    batch = Batch(np.zeros(BATCH_COUNTS, np.int64), np.zeros((ROWS, count), np.int64))
    counts, ended = batch.counts, np.zeros(count, np.int64)
    counts[FREE] = engine.blocks
    arrived, steps, missed = 0, 0, 0
    now_s = 0.0
    while True:
        if counts[RUNNING] + counts[WAITING] == 0:
            if arrived == count:
                return steps
            now_s = max(now_s, arrival_s[arrived])
        while arrived < count and arrival_s[arrived] <= now_s:
            insert(batch, WAITING, arrived, rank)
            arrived += 1
        if drop_late:
            missed += _drop_late(now_s, RUNNING, batch, requests, slos, judgement)
            missed += _drop_late(now_s, WAITING, batch, requests, slos, judgement)
            if counts[RUNNING] + counts[WAITING] == 0:
                continue
        load, _ = plan_step(batch, requests, engine)
        now_s += step_s(load, engine)
        for i in range(counts[RUNNING]):
            r = batch.rows[RUNNING, i]
            if chunk[r] > 0 and computed[r] + chunk[r] == length[r]:
                before = judgement.misses[r]
                judge_token(r, now_s, length[r] + 1 - prompt[r] >= arrivals.output[r], slos, judgement)
                missed += before == 0 and judgement.misses[r] > 0
        commit(batch, requests, now_s, ended)
        steps += 1
        if missed > misses_allowed:
            return GIVEN_UP


@compiled()
def _drop_late(now_s: float, which: int, batch: Batch, requests: Requests, slos: Slos, judgement: Judgement) -> int:
    """Give up those of a row whose first token is late; how many they are."""
    dropped, i = 0, 0
    while i < batch.counts[which]:
        r = batch.rows[which, i]
        if judgement.tokens[r] == 0 and now_s >= slos.first_due_s[r]:
            drop(batch, which, r)
            batch.counts[FREE] += requests.blocks[r]
            requests.blocks[r] = 0
            judgement.misses[r] += 1
            dropped += 1
        else:
            i += 1
    return dropped
