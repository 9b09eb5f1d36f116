"""Serves a workload on a cluster in virtual time: arrivals, steps, moves, publications. No I/O.

Between two ticks the instances run by themselves; at a tick they publish what they hold, and moves are started and completed.
So placement knows the load of the last publication and what was sent since, as in the mesh.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.simulator.cluster import Cluster, Moves
from penstock.planner_service.simulator.policies import Policy
from penstock.planner_service.simulator.tier import Replica
from penstock.planner_service.simulator.workload import Floats, Ints, Workload


@dataclass(frozen=True, slots=True, eq=False)
class ClusterServed:
    """What N requests felt, and what the cluster did.

    first_s, finish_s: 0 for what had not come to it by the end.
    boundaries: (time, where stages end) at every refinement interval. produced: (E) output tokens of requests ended there.
    """

    first_s: Floats
    finish_s: Floats
    moved: int
    moved_tokens: int
    failed_moves: int
    produced: Ints
    boundaries: list[tuple[float, list[float]]]


def serve_cluster(
    work: Workload,
    replica: Replica,
    instances: int,
    moves: Moves,
    policy: Callable[[Cluster], Policy],
    until_s: float = np.inf,
) -> ClusterServed:
    """Serve a workload, to its end or until a time after the first arrival. Deterministic.

    Raises:
        InvalidRequest: a request longer than an instance's KV, or a layout of another number of instances.
    """
    return serve_on(Cluster(work, [replica] * instances, moves), policy, until_s)


def serve_on(
    cluster: Cluster,
    policy: Callable[[Cluster], Policy],
    until_s: float = np.inf,
) -> ClusterServed:
    """As serve_cluster, on a cluster of any replicas that has not begun; it has the counters afterwards."""
    work, moves, rules = cluster.work, cluster.moves, policy(cluster)
    origin_s = work.arrival_s[0] if len(work) else 0.0
    arrival = work.arrival_s - origin_s
    upcoming, left, tick = 0, len(work), 0
    publish_every = max(1, round(moves.publish_s / moves.tick_s))
    refine_every = max(1, round(moves.refine_s / moves.tick_s))
    boundaries = list[tuple[float, list[float]]]()
    while left and cluster.now_s < until_s:
        if tick % refine_every == 0:
            boundaries.append((cluster.now_s, rules.boundaries()))
        tick += 1
        until = tick * moves.tick_s
        while upcoming < len(work) and arrival[upcoming] < until:
            cluster.send(upcoming, rules.place(upcoming), float(arrival[upcoming]))
            upcoming += 1
        ended = cluster.advance(until)
        left -= len(ended)
        rules.tick(ended, cluster.complete_moves())
        if tick % publish_every == 0:
            rules.publish()
    return ClusterServed(
        cluster.first_s,
        cluster.finish_s,
        cluster.moved,
        cluster.moved_tokens,
        cluster.failed_moves,
        cluster.produced,
        boundaries,
    )
