"""A tier whose requests are placed as routers place them: where the least work is pending. No I/O.

Routers know what workers published last, and what they have sent since: the decision is `services.domain.dispatch`, the code
that serves. It depends on everything that happens, so a tier is simulated as a whole, tick by tick. Plans are made with turns
(`tier`), which let every replica be simulated by itself.
"""

from collections.abc import Sequence

import numpy as np

from penstock.planner_service.simulator.batch_step import BUSY_S, PREEMPTIONS, STEPS
from penstock.planner_service.simulator.cluster import Cluster, Moves
from penstock.planner_service.simulator.loop import serve_on
from penstock.planner_service.simulator.policies import LeastWork
from penstock.planner_service.simulator.tier import Replica, Served
from penstock.planner_service.simulator.workload import Workload
from penstock.services.domain.errors import invalid

STILL = Moves(kv_bytes_per_token=1.0, bandwidth_bytes_per_s=1.0)
"""Nothing moves; workers publish their load as often as in the mesh."""


def serve_placed(work: Workload, replicas: Sequence[Replica]) -> Served:
    """Simulate. Deterministic.

    Raises:
        InvalidRequest: requests but no replica, a request longer than a replica's KV, or a replica with pipeline stages,
            whose batches are not simulated by tick.
    """
    if not len(work):
        return Served(np.zeros(0), np.zeros(0), np.zeros(0, np.int64), 0.0, 0, 0)
    if not replicas:
        raise invalid("replicas", "at least one is needed")
    if staged := [replica.shape for replica in replicas if replica.shape.pp > 1]:
        raise invalid("dispatch", f"pending-work is simulated without pipeline stages, which {staged[0]} has")
    cluster = serve_on(Cluster(work, replicas, STILL), LeastWork)
    first_s, finish_s = (times + work.arrival_s[0] for times in (cluster.first_s, cluster.finish_s))
    span_s, counters = float(finish_s.max() - work.arrival_s[0]), cluster.counters
    busy = float(counters[:, BUSY_S].mean()) / span_s if span_s > 0 else 0.0
    steps, preemptions = (int(counters[:, counter].sum()) for counter in (STEPS, PREEMPTIONS))
    return Served(first_s, finish_s, cluster.home, busy, steps, preemptions)
