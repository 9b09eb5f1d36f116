"""Where the requests of a simulated cluster go by other rules than Penstock's: what `stages` compares with."""

from collections.abc import Sequence

import numpy as np

from penstock.planner_service.simulator.cluster import Cluster, Transfer
from penstock.planner_service.simulator.policies import Policy
from penstock.planner_service.simulator.workload import Floats


class RoundRobin(Policy):
    """In turn, whatever is there; nothing moves."""

    def place(self, request: int) -> int:
        return request % self.cluster.instances


class MemoryAware(Policy):
    """Dispatch and migration by free memory, after Llumnix (Sun et al., OSDI 2024), with its load metric: freeness.

    An instance's freeness is its free KV less what its queue will need, per running request: the steps for which it can go
    on. New requests go where it is greatest. At each publication the instances below `low` are paired with the freest above
    `high`, the least free with the most, and hand over a running request, the shortest first.
    """

    low, high = 100.0, 400.0

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._free = np.full(cluster.instances, float(cluster.replica.lane_tokens))
        self._batch = np.zeros(cluster.instances)
        self._moving: set[int] = set()

    def place(self, request: int) -> int:
        best = int(np.argmax(self._freeness()))
        self._free[best] -= self.cluster.work.input_tokens[request]
        self._batch[best] += 1
        return best

    def publish(self) -> None:
        cluster = self.cluster
        for i in range(cluster.instances):
            waiting = cluster.waiting(i)
            self._free[i] = cluster.free_tokens(i) - cluster.length[waiting].sum()
            self._batch[i] = len(cluster.running(i)) + len(waiting)
        freeness = self._freeness()
        order = np.argsort(freeness)
        for source, target in zip(order.tolist(), order[::-1].tolist(), strict=True):
            if freeness[source] >= self.low or freeness[target] <= self.high:
                break
            if source in self._moving or target in self._moving:
                continue
            movable = cluster.decoding(source)
            if len(movable):
                request = int(movable[np.argmin(cluster.length[movable])])
                if cluster.length[request] < cluster.free_tokens(target):
                    self._moving |= {source, target}
                    cluster.start_move(request, source, target)

    def tick(self, ended: Sequence[int], completed: Sequence[tuple[Transfer, bool]]) -> None:
        for transfer, _ in completed:
            self._moving -= {transfer.source, transfer.target}

    def _freeness(self) -> Floats:
        return self._free / np.maximum(self._batch, 1)
