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
    BLOCK_TOKENS,
    CONTEXT_S,
    FREE,
    PAIR_S,
    RUNNING,
    WAITING,
    Engine,
    Load,
    Requests,
    blocks_for,
    commit,
    drop,
    insert,
    plan_step,
    step_s,
)
from planner_service.simulator.drafts import Drafts, best_window, standing, window_s

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
    drafts: Drafts,  # for all decodes of a step, as many tokens as pay most
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
        took_s = step_s(load, engine)
        window = 0
        if drafts.max_window > 0 and load.decodes > 0:
            window, more_s = _window(took_s, load, engine, drafts)
            took_s += more_s
        end_s = now_s + took_s
        for i in range(counts[RUNNING]):
            r = running[i]
            if chunk[r] > 0 and computed[r] + chunk[r] == requests.length[r]:
                before = judgement.misses[r]
                drafted = 0
                if window > 0 and chunk[r] == 1 and judgement.tokens[r] > 0:
                    drafted = _standing(r, window, requests, judgement, engine, counts, drafts)
                    requests.length[r] += drafted
                    computed[r] += drafted
                for k in range(1 + drafted):
                    last = requests.length[r] + 1 - drafted + k - prompt[r] >= output[r]
                    judge_token(r, end_s, last, slos, judgement)
                missed += before == 0 and judgement.misses[r] > 0
        commit(counts, running, requests, end_s, ended)
        now_s = end_s
        steps += 1
        if missed > misses_allowed:
            return GIVEN_UP


@numba.njit(cache=True, nogil=True)
def _window(took_s: float, load: Load, engine: Engine, drafts: Drafts) -> tuple[int, float]:
    """The window of most tokens per second, and by how much the step takes longer. Drafts come on top of a step's tokens."""
    decodes, context = load.decodes, float(load.decode_context)
    context_s, pair_s = engine.rates[CONTEXT_S], engine.rates[PAIR_S]
    room = drafts.max_window * decodes
    kx, ky = engine.kx, engine.ky
    window = best_window(took_s, load.tokens, decodes, context, room, kx, ky, context_s, pair_s, drafts)
    return window, window_s(window, load.tokens, decodes, context, kx, ky, context_s, pair_s, drafts)


@numba.njit(cache=True, nogil=True)
def _standing(
    r: int, window: int, requests: Requests, judgement: Judgement, engine: Engine, counts: N, drafts: Drafts
) -> int:
    """How many of a reply's drafted tokens stand, at most those that it has room for: its blocks are taken here."""
    block = engine.limits[BLOCK_TOKENS]
    most = min(window, requests.output[r] - (requests.length[r] - requests.prompt[r]) - 1)
    stand = standing(r, judgement.tokens[r], most, drafts.acceptance)
    needed = blocks_for(requests.length[r] + stand, block) - requests.blocks[r]
    while needed > counts[FREE]:
        stand -= 1
        needed = blocks_for(requests.length[r] + stand, block) - requests.blocks[r]
    if needed > 0:
        requests.blocks[r] += needed
        counts[FREE] -= needed
    return stand
