"""One replica of a fleet under SLOs, compiled: its columns, its KV, and the best effort that it serves besides. No I/O."""

from typing import NamedTuple

import numba
import numpy as np

from planner_service.simulator.attainment_kernel import Judgement
from planner_service.simulator.drafts import NO_DRAFTS, Drafts
from services.domain.slo.compiled.layout import (
    BEST_EFFORT,
    CONTEXT,
    COUNTS,
    DECODING,
    DUE_S,
    KIND,
    LEFT,
    PENDING,
    RELEASE_S,
    TIMES,
    TPOT_S,
    F,
    N,
)


class FleetRequests(NamedTuple):
    """R requests in order of arrival, (R) each.

    predicted: output tokens that admission counts with; where it is `output`, lengths are known. tightest_s: the pace that
    is scheduled, the tightest of its phases; infinite for none. A request with an infinite first_due_s in the Slos asks for
    best effort. value: what attaining its SLO is worth.
    """

    arrival_s: F
    prompt: N
    output: N
    predicted: N
    tightest_s: F
    value: F


class FleetLimits(NamedTuple):
    """kv_tokens, max_running: of each replica. hops: replicas that are tried behind the first. hop_s: until the next one
    has the request. decline: requests that no replica admits end; otherwise they are served as best effort. least_loaded: the
    first choice is the replica with the fewest prompt tokens before it, else they take turns.
    misses_allowed: the simulation is given up once more requests missed. drafts: for decodes under a promise.
    """

    kv_tokens: int
    max_running: int
    hops: int
    hop_s: float
    decline: bool
    least_loaded: bool
    misses_allowed: int
    drafts: Drafts = NO_DRAFTS


class FleetOutcome(NamedTuple):
    """What R requests received, (R) each: when the first and the last token came (0 for those declined), ADMITTED,
    SERVED_BEST_EFFORT or DECLINED, by which replica, how often they were preempted."""

    first_s: F
    finish_s: F
    outcome: N
    replica: N
    preemptions: N


class FleetReplica(NamedTuple):
    """One replica: its columns, and its queues of requests. memory (R): KV tokens of a promised request when it has all its
    tokens, 0 for others.

    sizes: see below. reach_s (R): when a request reaches the replica that it was sent to.
    """

    counts: N
    times: F
    who: N
    inbox: N
    queue: N
    sizes: N


# sizes of a replica
# WHOLE: KV of all promised requests when each has all its tokens; PEAK: what they hold at most at any time, by certificate
COLUMNS, INBOX, QUEUED, WHOLE, PEAK, BEST_EFFORT_KV, BEST_EFFORT_RUNNING = range(7)
SIZES = 7


@numba.njit(cache=True, nogil=True)
def reserved(sizes: N) -> int:
    """KV tokens that promised requests hold at most, now or later."""
    return int(min(sizes[WHOLE], sizes[PEAK]))


@numba.njit(cache=True, nogil=True)
def held_kv(one: FleetReplica, grants: N, memory: N) -> int:
    """KV tokens that promised requests hold at the end of a step with these tokens, prompts counted as a whole."""
    held = 0
    for i in range(one.sizes[COLUMNS]):
        if memory[one.who[i]] > 0:
            held += one.counts[CONTEXT, i] + (grants[i] if one.counts[DECODING, i] == 1 else one.counts[PENDING, i])
    return held


@numba.njit(cache=True, nogil=True)
def start_best_effort(one: FleetReplica, requests: FleetRequests, judgement: Judgement, limits: FleetLimits) -> None:
    """Start those queued for whom all their tokens and the next one have room, by arrival."""
    while one.sizes[QUEUED] > 0 and one.sizes[COLUMNS] < limits.max_running:
        r, n = one.queue[0], one.sizes[COLUMNS]
        needs = requests.prompt[r] + judgement.tokens[r]
        held = reserved(one.sizes) + one.sizes[BEST_EFFORT_KV] + one.sizes[BEST_EFFORT_RUNNING]
        if held + needs + 1 > limits.kv_tokens:
            return
        one.counts[KIND, n], one.counts[DECODING, n], one.counts[CONTEXT, n] = BEST_EFFORT, 0, 0
        one.counts[PENDING, n], one.counts[LEFT, n] = needs, requests.output[r] - judgement.tokens[r]
        one.times[DUE_S, n], one.times[TPOT_S, n], one.times[RELEASE_S, n] = np.inf, np.inf, -np.inf
        one.who[n] = r
        one.sizes[COLUMNS] = n + 1
        one.sizes[BEST_EFFORT_KV] += needs
        one.sizes[BEST_EFFORT_RUNNING] += 1
        for k in range(1, one.sizes[QUEUED]):
            one.queue[k - 1] = one.queue[k]
        one.sizes[QUEUED] -= 1


@numba.njit(cache=True, nogil=True)
def make_room(one: FleetReplica, memory: N, limits: FleetLimits, out: FleetOutcome) -> None:
    """Preempt until reserved KV, best effort's and a token for each of its decodes have room."""
    while reserved(one.sizes) + one.sizes[BEST_EFFORT_KV] + one.sizes[BEST_EFFORT_RUNNING] > limits.kv_tokens:
        preempt_last(one, memory, out)


@numba.njit(cache=True, nogil=True)
def preempt_last(one: FleetReplica, memory: N, out: FleetOutcome) -> None:
    """Queue the best-effort request started last again; where there is none, the promised request started last."""
    i = one.sizes[COLUMNS] - 1
    while i >= 0 and memory[one.who[i]] > 0:
        i -= 1
    if i < 0:
        i = one.sizes[COLUMNS] - 1
    r = one.who[i]
    if memory[r] > 0:
        one.sizes[WHOLE] -= memory[r]
        memory[r] = 0
    else:
        one.sizes[BEST_EFFORT_KV] -= one.counts[CONTEXT, i] + one.counts[PENDING, i]
        one.sizes[BEST_EFFORT_RUNNING] -= 1
    one.sizes[QUEUED] = queue_up(one.queue, one.sizes[QUEUED], r)
    out.preemptions[r] += 1
    remove(one, i)


@numba.njit(cache=True, nogil=True)
def queue_up(queue: N, queued: int, r: int) -> int:
    """By arrival, so that those preempted keep their place; returns how many are queued."""
    at = queued
    while at > 0 and queue[at - 1] > r:
        queue[at] = queue[at - 1]
        at -= 1
    queue[at] = r
    return queued + 1


@numba.njit(cache=True, nogil=True)
def remove(one: FleetReplica, i: int) -> None:
    """Take column i out, order kept."""
    for k in range(i + 1, one.sizes[COLUMNS]):
        for row in range(COUNTS):
            one.counts[row, k - 1] = one.counts[row, k]
        for row in range(TIMES):
            one.times[row, k - 1] = one.times[row, k]
        one.who[k - 1] = one.who[k]
    one.sizes[COLUMNS] -= 1
