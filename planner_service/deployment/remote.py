"""What a remote tier costs at which latency, under one workload: no GPUs, and dollars for tokens. No I/O."""

from collections.abc import Sequence

import numpy as np

from penstock.planner_service.deployment.mixed import GpuTypes, MixedTable, Room
from penstock.planner_service.deployment.search import NOTHING, Strategy
from penstock.planner_service.simulator.felt import Measured
from penstock.planner_service.simulator.remote import RemoteTier
from penstock.planner_service.simulator.tier import Dispatch, Times
from penstock.planner_service.simulator.workload import Bools, Floats, Workload


class RemoteTable(MixedTable):
    """A tier with one strategy: to send all requests to the API, whose latency does not depend on anything planned.

    per_s: the rate at which the requests come. max_utilisation: of the limits, the share that they may take.
    """

    def __init__(
        self,
        remote: RemoteTier,
        work: Workload,
        percentile: float,
        types: GpuTypes,
        counted: Bools,
        measured: Measured,
        *,
        per_s: float,
        max_utilisation: float,
    ) -> None:
        super().__init__(work, (), Dispatch.CAPACITY, percentile, None, types, counted, measured)
        self._times = Times(np.full(len(work), remote.first_token_s), remote.latency_s(work))
        self.strategy, self._within_limits, self._dollars = NOTHING, True, remote.dollars(work)
        if len(work):
            dollars = self._dollars / len(work) * per_s * 3600
            self.strategy = Strategy((), self._percentile_s(self.alone_s()), remote, dollars)
            self._within_limits = per_s <= max_utilisation * remote.sustained_per_s(work)

    @property
    def least_gpus(self) -> int:
        return 0

    @property
    def least_cost_s(self) -> float:
        return 3600 * self._dollars

    @property
    def least_cost(self) -> float:
        return self.strategy.remote_dollars_per_hour

    @property
    def feasible(self) -> bool:
        """Whether the limits allow the requests."""
        return self._within_limits

    @property
    def can_serve(self) -> bool:
        return True

    def sustains(self, strategy: Strategy) -> bool:
        return self._within_limits

    def alone_s(self, measured: Measured | None = None) -> Floats:
        return self._times.measured(self._measured if measured is None else measured, self._work.output_tokens)

    def times(self, strategy: Strategy) -> Times:
        return self._times

    def option(self, limit_s: float, number: int) -> tuple[Strategy, Room, float] | None:
        strategy = self.strategy
        if number or strategy.latency_s > limit_s:
            return None
        return strategy, (0,) * len(self.types.names), strategy.remote_dollars_per_hour

    def fastest(self, room: Sequence[int], most: int, under_cost: float = np.inf) -> Strategy | None:
        return self.strategy if self.strategy.remote_dollars_per_hour < under_cost else None

    def faster(self, room: Sequence[int], most: int, than_s: float) -> Strategy | None:
        return self.strategy if self.strategy.latency_s < than_s else None
