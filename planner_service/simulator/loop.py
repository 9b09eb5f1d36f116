"""Serves a workload on a cluster in virtual time: arrivals, steps, moves, publications. No I/O.

Between two ticks the instances run by themselves; at a tick they publish what they hold, and moves are started and completed.
So placement knows the load of the last publication and what was sent since, as in the mesh.
"""

from collections.abc import Callable

import numpy as np

from penstock.planner_service.simulator.cluster import Cluster
from penstock.planner_service.simulator.policies import Policy


def serve_on(cluster: Cluster, policy: Callable[[Cluster], Policy], until_s: float = np.inf) -> Cluster:
    """Serve the workload of a cluster that has not begun, to its end or until a time after the first arrival. Deterministic.

    Returns the cluster: its times count from the first arrival, and are 0 for what had not come by the end.

    Raises:
        InvalidRequest: a policy for another number of instances.
    """
    work, moves, rules = cluster.work, cluster.moves, policy(cluster)
    origin_s = work.arrival_s[0] if len(work) else 0.0
    arrival = work.arrival_s - origin_s
    upcoming, left, tick = 0, len(work), 0
    publish_every = max(1, round(moves.publish_s / moves.tick_s))
    while left and cluster.now_s < until_s:
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
    return cluster
