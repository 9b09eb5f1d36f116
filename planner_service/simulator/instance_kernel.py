"""One engine instance of a cluster in virtual time, step by step and open to moves, compiled. No I/O.

Its steps are those of `batch_step`, as are those of `kernel`, which runs a replica from its first request to its last
in one call. Here an instance can be stopped at any time, asked what it holds, and relieved of a sequence or given one:
what a cluster needs whose requests move.
"""

from typing import NamedTuple

import numpy as np

from penstock.planner_service.simulator.batch_step import (
    BATCH_COUNTS,
    BUSY_S,
    COMING,
    COUNTERS,
    FREE,
    PREEMPTIONS,
    PRIORITY_STEP,
    RUNNING,
    STEPS,
    WAITING,
    Batch,
    Engine,
    Requests,
    commit,
    drop,
    insert,
    plan_step,
    step_s,
)
from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import F, N

ARRIVED = BATCH_COUNTS  # counts: that have ever come
SHORTEST_WAIT_S = 1e-9  # an instance where nothing fits waits at least so long


class Instance(NamedTuple):
    """batch: with the row COMING, of requests on their way here, in order of coming_s (capacity), when they are there.
    ready_s (1): when the current step ends. counters (COUNTERS)."""

    batch: Batch
    coming_s: F
    ready_s: F
    counters: F


def new_instances(count: int, capacity: int) -> Instance:
    """As many instances without KV: the arrays of `Instance` with one more axis, the first."""
    batch = Batch(np.zeros((count, BATCH_COUNTS + 1), np.int64), np.zeros((count, COMING + 1, capacity), np.int64))
    return Instance(batch, np.zeros((count, capacity)), np.zeros((count, 1)), np.zeros((count, COUNTERS)))


@compiled()
def one_of(instances: Instance, i: int) -> Instance:
    """Instance i, with the same memory."""
    batch = Batch(instances.batch.counts[i], instances.batch.rows[i])
    return Instance(batch, instances.coming_s[i], instances.ready_s[i], instances.counters[i])


@compiled()
def advance_all(
    until_s: float, instances: Instance, alike: N, engine: Engine, priority: N, requests: Requests, ended: N
) -> int:
    """`advance` of all instances that have this engine (alike)."""
    n_ended = 0
    for i in alike:
        n_ended += advance(until_s, one_of(instances, i), engine, priority, requests, ended[n_ended:])
    return n_ended


@compiled()
def pending_work(instances: Instance, requests: Requests) -> N:
    """(E, 3): of every instance the prompt tokens to compute, the requests and their tokens, as in a worker's record.

    As in workers, requests that have not started count in full: they find what is cached only when they start.
    """
    counts, rows = instances.batch
    pending = np.zeros((len(counts), 3), np.int64)
    for i in range(len(counts)):
        for which in (RUNNING, WAITING, COMING):
            for r in rows[i, which, : counts[i, which]]:
                left = requests.length[r] - (requests.computed[r] if requests.blocks[r] > 0 else 0)
                pending[i, 0] += left if left > 1 else 0
                pending[i, 1] += 1
                pending[i, 2] += requests.length[r]
    return pending


@compiled()
def advance(until_s: float, instance: Instance, engine: Engine, priority: N, requests: Requests, ended: N) -> int:
    """Take every step that begins before until_s. Returns how many requests ended.

    priority (R): of all requests of the cluster. ended (capacity): out.
    """
    batch, coming_s, ready_s, counters = instance
    counts, n_ended = batch.counts, 0
    while True:
        start = ready_s[0]
        if counts[RUNNING] + counts[WAITING] == 0:
            if counts[COMING] == 0:
                return n_ended
            start = max(start, coming_s[0])
        if start >= until_s:
            return n_ended
        _let_in(start, instance, engine, priority, requests)
        load, preempted = plan_step(batch, requests, engine)
        took = step_s(load, engine)
        if load.tokens == 0:  # nothing fits: KV is set aside for what is on its way
            next_s = coming_s[0] if counts[COMING] > 0 else until_s
            took = max(next_s - start, SHORTEST_WAIT_S)
        else:
            counters[BUSY_S] += took
            counters[STEPS] += 1
        counters[PREEMPTIONS] += preempted
        ready_s[0] = start + took
        n_ended += commit(batch, requests, start + took, ended[n_ended:])


@compiled()
def _let_in(start_s: float, instance: Instance, engine: Engine, priority: N, requests: Requests) -> None:
    """Those that are here by now join the queue, or the batch if they have moved here with their KV and there is a place.

    Those that moved hold blocks; those that have not started yet hold none, whatever of their prompts is cached.
    """
    batch, counts = instance.batch, instance.batch.counts
    while counts[COMING] > 0 and instance.coming_s[0] <= start_s:
        r = batch.rows[COMING, 0]
        for i in range(1, counts[COMING]):
            instance.coming_s[i - 1] = instance.coming_s[i]
        drop(batch, COMING, r)
        requests.rank[r] = counts[ARRIVED] - priority[r] * PRIORITY_STEP
        counts[ARRIVED] += 1
        if requests.blocks[r] > 0 and counts[RUNNING] < engine.max_running:
            insert(batch, RUNNING, r, requests.rank)
            continue
        if requests.blocks[r] > 0:
            counts[FREE] += requests.blocks[r]
            requests.computed[r] = requests.blocks[r] = 0
        insert(batch, WAITING, r, requests.rank)


@compiled()
def remove(instance: Instance, requests: Requests, r: int) -> None:
    """Take a running request out, and free its blocks here."""
    drop(instance.batch, RUNNING, r)
    instance.batch.counts[FREE] += requests.blocks[r]
    requests.blocks[r] = 0


@compiled()
def put_in(instance: Instance, r: int, at_s: float) -> None:
    """A request is there from at_s on."""
    row, coming_s, i = instance.batch.rows[COMING], instance.coming_s, instance.batch.counts[COMING]
    while i > 0 and coming_s[i - 1] > at_s:
        row[i], coming_s[i] = row[i - 1], coming_s[i - 1]
        i -= 1
    row[i], coming_s[i] = r, at_s
    instance.batch.counts[COMING] += 1
