"""One replica of a fleet under SLOs, compiled: its columns, its KV, and the best effort that it serves as well. No I/O."""

from typing import NamedTuple

import numpy as np

from penstock.planner_service.simulator.attainment_kernel import Judgement, Slos
from penstock.planner_service.simulator.workload import Bools
from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.certified_step import MOST_HELD, ended
from penstock.services.domain.slo.compiled.layout import (
    BEST_EFFORT,
    CONTEXT,
    COUNTS,
    DECODING,
    DUE_S,
    KIND,
    LEFT,
    PENDING,
    PLACED,
    RELEASE_S,
    TIMES,
    TPOT_S,
    Columns,
    F,
    N,
    StepModel,
)


class FleetRequests(NamedTuple):
    """R requests in order of arrival, (R) each.

    tightest_s: the pace that is scheduled, the tightest of its phases; infinite for none. A request with an infinite
    first_due_s in the Slos asks for best effort.
    """

    arrival_s: F
    prompt: N
    output: N
    tightest_s: F


AS_PREDICTED = np.ones(1)


class FleetLimits(NamedTuple):
    """kv_tokens: of each replica. hops: replicas that are tried after the first. took: shares of their prediction that steps
    take, one after the other and then from the first on again."""

    kv_tokens: int
    hops: int
    took: F = AS_PREDICTED


class FleetOutcome(NamedTuple):
    """What R requests received, (R) each: when the first and the last token came, whether they were promised what they ask
    for, how often they were preempted. most_kv (replicas): the most KV tokens that each replica held."""

    first_s: F
    finish_s: F
    admitted: Bools
    preemptions: N
    most_kv: N


def new_outcome(requests: int, replicas: int) -> FleetOutcome:
    times, admitted = np.zeros((2, requests)), np.zeros(requests, np.bool_)
    return FleetOutcome(times[0], times[1], admitted, np.zeros(requests, np.int64), np.zeros(replicas, np.int64))


class FleetReplica(NamedTuple):
    """One replica: its columns, and its queues of requests. memory (R): KV tokens of a promised request when it has all its
    tokens, 0 for others.

    sizes: see below. certified: of `certified_step`.
    """

    columns: Columns
    who: N
    inbox: N
    queue: N
    sizes: N
    certified: F


# sizes of a replica
# WHOLE: KV of all promised requests when each has all its tokens
COLUMNS, INBOX, QUEUED, WHOLE, BEST_EFFORT_KV, BEST_EFFORT_RUNNING = range(6)
SIZES = 6


class Run(NamedTuple):
    """What is served, and by which rules. tpots_s (L): every pace among the requests, once each, as kept (KEPT_SHARE).
    judgement, out: what the requests receive."""

    requests: FleetRequests
    slos: Slos
    tpots_s: F
    model: StepModel
    limits: FleetLimits
    judgement: Judgement
    out: FleetOutcome


@compiled(allocates=False)
def reserved(one: FleetReplica) -> int:
    """KV tokens that promised requests hold at most, now or later."""
    return int(min(one.sizes[WHOLE], one.certified[MOST_HELD]))


@compiled(allocates=False)
def over_kv(one: FleetReplica, limits: FleetLimits) -> bool:
    """Whether reserved KV, best effort's and a token for each of its decodes have no room."""
    return reserved(one) + one.sizes[BEST_EFFORT_KV] + one.sizes[BEST_EFFORT_RUNNING] > limits.kv_tokens


@compiled(allocates=False)
def start_best_effort(one: FleetReplica, run: Run) -> None:
    """Start those queued for whom all their tokens and the next one have room, by arrival; first, promised requests have
    places."""
    requests, judgement = run.requests, run.judgement
    while one.sizes[QUEUED] > 0 and one.sizes[COLUMNS] < run.model.places:
        r, n = one.queue[0], one.sizes[COLUMNS]
        needs = requests.prompt[r] + judgement.tokens[r]
        held = reserved(one) + one.sizes[BEST_EFFORT_KV] + one.sizes[BEST_EFFORT_RUNNING]
        if held + needs + 1 > run.limits.kv_tokens:
            return
        counts, times = one.columns
        counts[KIND, n], counts[DECODING, n], counts[CONTEXT, n] = BEST_EFFORT, 0, 0
        counts[PENDING, n], counts[LEFT, n] = needs, requests.output[r] - judgement.tokens[r]
        counts[PLACED, n] = 1
        times[DUE_S, n], times[TPOT_S, n], times[RELEASE_S, n] = np.inf, np.inf, -np.inf
        one.who[n] = r
        one.sizes[COLUMNS] = n + 1
        one.sizes[BEST_EFFORT_KV] += needs
        one.sizes[BEST_EFFORT_RUNNING] += 1
        for k in range(1, one.sizes[QUEUED]):
            one.queue[k - 1] = one.queue[k]
        one.sizes[QUEUED] -= 1


@compiled(allocates=False)
def make_room(one: FleetReplica, memory: N, run: Run) -> None:
    """Preempt until nothing is over."""
    while over_kv(one, run.limits):
        preempt_last(one, memory, run.out)


@compiled(allocates=False)
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
        ended(one.certified, 1)
    else:
        one.sizes[BEST_EFFORT_KV] -= one.columns.counts[CONTEXT, i] + one.columns.counts[PENDING, i]
        one.sizes[BEST_EFFORT_RUNNING] -= 1
    one.sizes[QUEUED] = queue_up(one.queue, one.sizes[QUEUED], r)
    out.preemptions[r] += 1
    remove(one, i)


@compiled(allocates=False)
def queue_up(queue: N, queued: int, r: int) -> int:
    """By arrival, so that those preempted keep their place; returns how many are queued."""
    at = queued
    while at > 0 and queue[at - 1] > r:
        queue[at] = queue[at - 1]
        at -= 1
    queue[at] = r
    return queued + 1


@compiled(allocates=False)
def remove(one: FleetReplica, i: int) -> None:
    """Take column i out, order kept."""
    counts, times = one.columns
    for k in range(i + 1, one.sizes[COLUMNS]):
        for row in range(COUNTS):
            counts[row, k - 1] = counts[row, k]
        for row in range(TIMES):
            times[row, k - 1] = times[row, k]
        one.who[k - 1] = one.who[k]
    one.sizes[COLUMNS] -= 1


@compiled(allocates=False)
def places_of(one: FleetReplica, grants: N) -> int:
    """Places that a step with these tokens takes."""
    places = 0
    for i in range(one.sizes[COLUMNS]):
        places += one.columns.counts[PLACED, i] == 1 or grants[i] > 0
    return places


@compiled(allocates=False)
def kv_held(columns: Columns, requests: int, grants: N) -> int:
    """KV tokens of a replica at the end of a step, prompts counted as a whole."""
    held, counts = 0, columns.counts
    for i in range(requests):
        if counts[PLACED, i] == 0 and grants[i] == 0:
            continue
        held += counts[CONTEXT, i] + (grants[i] if counts[DECODING, i] == 1 else counts[PENDING, i])
    return held
