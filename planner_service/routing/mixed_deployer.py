"""The deployment of a cascade on several types of GPU: types and replicas of every tier. No I/O.

Each tier has options within a latency, from the cheapest up (`deployment.mixed`). A branch and bound over them finds those
that together cost least and fit the GPUs of each type: exact over the options, as with the least that the tiers still open
cost, no other combination can be cheaper. The least latency of the slowest tier is found by bisection of that.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Unpack

from penstock.planner_service.deployment.mixed import GpuTypes, MixedTable, Room
from penstock.planner_service.deployment.remote import RemoteTable
from penstock.planner_service.deployment.search import INFEASIBLE, LatencyTable, Strategy
from penstock.planner_service.routing.deployer import Deployer, DeployerOptions
from penstock.planner_service.routing.grading import Grading, TierLoad
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.routing.solution import Deployment
from penstock.planner_service.simulator.felt import Measured
from penstock.planner_service.simulator.remote import RemoteTier
from penstock.planner_service.simulator.tier import Replica
from penstock.planner_service.simulator.workload import Floats, Workload

TOLERANCE = 1e-3  # of the least latency


class MixedDeployer(Deployer):
    """As Deployer, with `types` of GPU: each replica's shape names its own. Costs are in their prices.

    remotes: by tier, the API that serves it instead of replicas; empty where none is remote. What its tokens cost counts in
    dollars per hour: then prices of GPUs must be, too.
    """

    tolerance = TOLERANCE

    def __init__(
        self,
        sample: JudgedSample,
        arrival_s: Floats,
        kinds: Sequence[Sequence[Replica]],
        types: GpuTypes,
        *,
        grading: Grading | None = None,
        remotes: Sequence[RemoteTier | None] = (),
        **how: Unpack[DeployerOptions],
    ) -> None:
        super().__init__(sample, arrival_s, kinds, types.most, grading=grading, **how)
        self.types, self._remotes = types, remotes
        self._chosen: dict[tuple[tuple[MixedTable, ...], float], tuple[float, tuple[Strategy, ...]] | None] = {}

    @property
    def gpu_step(self) -> int:
        return 1

    @property
    def least_cost(self) -> float:
        return 0.0 if any(self._remotes) else min(self.types.cost)

    def cost(self, deployment: Deployment) -> float:
        strategies = deployment.strategies
        return sum(self.types.price(self.types.of(s)) + s.remote_dollars_per_hour for s in strategies)

    def cost_within(self, thresholds: Sequence[float], limit_s: float, under: float = INFEASIBLE) -> float:
        chosen = self._cheapest(self._mixed(thresholds), limit_s)
        return INFEASIBLE if chosen is None or chosen[0] >= under else chosen[0]

    def cheapest_within(self, thresholds: Sequence[float], limit_s: float) -> Deployment | None:
        tables = self._mixed(thresholds)
        chosen = self._cheapest(tables, limit_s)
        return None if chosen is None else self._improved(tables, chosen[1])

    def balanced(self, thresholds: Sequence[float]) -> Deployment | None:
        """None: what a GPU is worth to a tier depends on its type."""
        return None

    def splits(self, thresholds: Sequence[float]) -> Iterator[Deployment]:
        """None, as for `balanced`."""
        return iter(())

    def shifted(self, thresholds: Sequence[float], deployment: Deployment) -> Iterator[Deployment]:
        tables, strategies = self._mixed(thresholds), deployment.strategies
        taken = [self.types.of(strategy) for strategy in strategies]
        for tier, table in enumerate(tables):
            if (faster := table.faster(*self._room(taken, tier), strategies[tier].latency_s)) is not None:
                yield _with(deployment, {tier: faster})
        for giver, table in enumerate(tables):
            own = taken[giver]
            slower = table.fastest(own, sum(own), self.types.price(own)) if sum(own) else None
            if slower is None:
                continue
            left = [self.types.of(slower) if t == giver else one for t, one in enumerate(taken)]
            for tier, other in enumerate(tables):
                if tier == giver:
                    continue
                if (faster := other.faster(*self._room(left, tier), strategies[tier].latency_s)) is not None:
                    yield _with(deployment, {tier: faster, giver: slower})

    def reduced(self, thresholds: Sequence[float], deployment: Deployment) -> Iterator[Deployment]:
        taken = [self.types.of(strategy) for strategy in deployment.strategies]
        for tier, table in enumerate(self._mixed(thresholds)):
            if sum(taken[tier]):  # on GPUs of any type that are free
                slower = table.fastest(*self._room(taken, tier), self.types.price(taken[tier]))
                if slower is not None:
                    yield _with(deployment, {tier: slower})

    def _room(self, taken: Sequence[Room], tier: int) -> tuple[Room, int]:
        """(GPUs of each type that the other tiers leave to a tier, GPUs of all types that they leave)."""
        others = [sum(one[p] for t, one in enumerate(taken) if t != tier) for p in range(len(self.types.names))]
        room = tuple(have - other for have, other in zip(self.types.gpus, others, strict=True))
        return room, self.types.most - sum(others)

    def _new_table(self, tier: int, load: TierLoad, measured: Measured) -> LatencyTable:
        remote = self._remotes[tier] if self._remotes else None
        if remote is None:
            how = (self.dispatch, self.percentile, self._sustain_of(tier, load.work), self.types)
            return MixedTable(load.work, self.kinds[tier], *how, load.counted, measured)
        return RemoteTable(
            remote,
            load.work,
            self.percentile,
            self.types,
            load.counted,
            measured,
            per_s=self._traffic.per_s(load.work),
            max_utilisation=1.0 if self.max_utilisation is None else self.max_utilisation,
        )

    def _unserved_table(self, work: Workload) -> LatencyTable:
        return MixedTable(work, [], self.dispatch, self.percentile, None, self.types)

    def _mixed(self, thresholds: Sequence[float]) -> tuple[MixedTable, ...]:
        return tuple(table for table in self._routed(thresholds)[1] if isinstance(table, MixedTable))

    def _forget(self) -> None:
        super()._forget()
        self._chosen.clear()

    def _solve(self, tables: Sequence[LatencyTable]) -> Deployment | None:
        """The least latency of the slowest tier, by bisection of the limit within which something fits."""
        mixed = tuple(table for table in tables if isinstance(table, MixedTable))
        chosen = self._cheapest(mixed, INFEASIBLE)
        if chosen is None:
            return None
        low = max(table.least_alone_s for table in mixed)
        high = max(strategy.latency_s for strategy in chosen[1])
        if (fits := self._cheapest(mixed, low)) is not None:
            return self._improved(mixed, fits[1])
        while high > low * (1 + TOLERANCE):
            middle = math.sqrt(low * high)
            fits = self._cheapest(mixed, middle)
            if fits is None:
                low = middle
            else:
                chosen, high = fits, max(strategy.latency_s for strategy in fits[1])
        return self._improved(mixed, chosen[1])

    def _improved(self, tables: Sequence[MixedTable], strategies: Sequence[Strategy]) -> Deployment:
        """Every tier's fastest strategy on the GPUs that it has."""
        best = []
        for table, strategy in zip(tables, strategies, strict=True):
            own = self.types.of(strategy)
            faster = table.fastest(own, sum(own))
            best.append(strategy if faster is None or faster.latency_s >= strategy.latency_s else faster)
        return Deployment.of(best)

    def _cheapest(self, tables: tuple[MixedTable, ...], limit_s: float) -> tuple[float, tuple[Strategy, ...]] | None:
        """(cost, strategies) of the cheapest deployment within a latency; None where none fits."""
        key = (tables, limit_s)
        if key not in self._chosen:
            self._chosen[key] = self._branch_and_bound(tables, limit_s)
        return self._chosen[key]

    def _branch_and_bound(
        self, tables: Sequence[MixedTable], limit_s: float
    ) -> tuple[float, tuple[Strategy, ...]] | None:
        if not all(table.feasible for table in tables):
            return None
        order = sorted(range(len(tables)), key=lambda i: -tables[i].least_gpus)
        least = [0.0] * (len(order) + 1)  # what the tiers from this one on cost at least
        for at in reversed(range(len(order))):
            first = tables[order[at]].option(limit_s, 0)
            if first is None:
                return None
            least[at] = least[at + 1] + first[2]
        best: tuple[float, tuple[Strategy, ...]] | None = None
        chosen: list[Strategy] = [Strategy((), 0.0)] * len(tables)

        def extend(at: int, room: Room, most: int, cost: float) -> None:
            nonlocal best
            if best is not None and cost + least[at] >= best[0]:
                return
            if at == len(order):
                best = cost, tuple(chosen)
                return
            number = 0
            while (option := tables[order[at]].option(limit_s, number)) is not None:
                strategy, taken, own = option
                if best is not None and cost + own + least[at + 1] >= best[0]:
                    return
                left = tuple(have - n for have, n in zip(room, taken, strict=True))
                if min(left) >= 0 and sum(taken) <= most:
                    chosen[order[at]] = strategy
                    extend(at + 1, left, most - sum(taken), cost + own)
                number += 1

        extend(0, self.types.gpus, self.types.most, 0.0)
        return best


def _with(deployment: Deployment, changed: dict[int, Strategy]) -> Deployment:
    return Deployment.of([changed.get(tier, one) for tier, one in enumerate(deployment.strategies)])
