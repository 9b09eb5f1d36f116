"""Parallelism search: the replicas that serve a tier's workload with the least latency on f GPUs. No I/O.

A tier on f GPUs runs a multiset of replicas whose GPUs sum to at most f (CASCADIA, section 3.2); its latency l(f) comes from
the simulator. Searched are all multisets of one kind of replica, and those of two kinds that leave no room for one replica
more of either (every row of the paper's Table 3 is of these), the most promising first: by latency alone, over what of the
replicas' capacity is left. No multiset is simulated twice, and none further than until so many requests are late that its
percentile cannot be under the best one known (kernel.percentile_within): nothing is lost by that. `exhaustive_latency` tries
every multiset: tests hold one against the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner_service.simulator import kernel
from planner_service.simulator.tier import Dispatch, KindTable, Replica, alone_latency, assign, serve
from planner_service.simulator.workload import Floats, Workload

Parts = tuple[tuple[int, int], ...]  # (kind, count) each
INFEASIBLE = float("inf")
MIXED_TRIED = 12  # multisets of two kinds that are simulated for one f


@dataclass(frozen=True, slots=True)
class Strategy:
    """Replicas by kind with their counts; none for a tier without GPUs. latency_s: at the percentile asked for."""

    replicas: tuple[tuple[Replica, int], ...]
    latency_s: float

    @property
    def gpus(self) -> int:
        return sum(replica.shape.gpus * count for replica, count in self.replicas)

    def __str__(self) -> str:
        def one(replica: Replica, count: int) -> str:
            return f"({f'DP={count}, ' if count > 1 else ''}{replica.shape})"

        return ", ".join(one(*part) for part in self.replicas) or "-"


NOTHING = Strategy((), 0.0)


class LatencyTable:
    """l(f) of one tier under one workload, computed where it is asked for, non-increasing in f."""

    def __init__(self, work: Workload, kinds: Sequence[Replica], dispatch: Dispatch, percentile: float) -> None:
        """`kinds`: replicas that fit; those without room for the longest request are left out."""
        self._work, self._dispatch, self._percentile = work, dispatch, percentile
        self._kinds = [kind for kind in kinds if kind.lane_tokens >= work.longest_tokens]
        self._found: dict[int, Strategy | None] = {}
        self._exact: dict[Parts, float] = {}  # latencies
        self._at_least: dict[Parts, float] = {}  # bounds of those that were given up
        self.simulations = 0
        means = (float(work.input_tokens.mean()), float(work.output_tokens.mean())) if len(work) else (1.0, 1.0)
        self._table = KindTable(self._kinds)
        self._alone = np.zeros((len(self._kinds), len(work)))  # (K, N)
        for k, kind in enumerate(self._kinds):
            self._alone[k] = alone_latency(work, kind)
        self._alone_means = self._alone.mean(axis=1) if len(work) else np.zeros(len(self._kinds))
        self._alone_percentiles = [float(np.percentile(each, percentile)) if len(work) else 0.0 for each in self._alone]
        self._sizes = np.array([kind.shape.gpus for kind in self._kinds], np.int64)
        self._capacity = np.array([kind.capacity_per_s(*means) for kind in self._kinds])

    @property
    def least_gpus(self) -> int:
        """The fewest GPUs that can serve; 0 for no requests. ValueError where no kind fits."""
        return min(kind.shape.gpus for kind in self._kinds) if len(self._work) else 0

    @property
    def feasible(self) -> bool:
        return bool(self._kinds) or not len(self._work)

    def alone_s(self) -> Floats:
        """(N) seconds of each request alone on the kind that is fastest for it."""
        return np.asarray(np.min(self._alone, axis=0))

    def best(self, gpus: int) -> Strategy | None:
        """The best strategy on at most `gpus`; None where nothing fits."""
        if not len(self._work):
            return NOTHING
        if gpus not in self._found:
            known = [s for f, s in self._found.items() if f < gpus and s is not None]
            self._found[gpus] = self._search(gpus, min(known, key=lambda s: s.latency_s, default=None))
        return self._found[gpus]

    def latency_s(self, gpus: int) -> float:
        found = self.best(gpus)
        return INFEASIBLE if found is None else found.latency_s

    def _search(self, gpus: int, best: Strategy | None) -> Strategy | None:
        """The best of the strategies on `gpus` if it is better than `best`."""
        for parts in self._candidates(gpus):
            latency = self.simulate(parts, INFEASIBLE if best is None else best.latency_s)
            if best is None or latency < best.latency_s:
                best = Strategy(tuple((self._kinds[k], count) for k, count in parts), latency)
        return best

    def _candidates(self, gpus: int) -> Iterator[Parts]:
        """One kind each, then the most promising of two kinds."""
        most = len(self._work)  # more replicas than requests serve nobody
        span_s = float(self._work.arrival_s[-1] - self._work.arrival_s[0])
        traffic = (self._capacity, self._alone_means, self._work.rate_per_s, span_s)
        cluster = (self._sizes, *traffic, gpus, most)
        counts, guesses = kernel.single_estimates(*cluster)
        for k in np.argsort(guesses, kind="stable").tolist():
            if counts[k]:
                yield ((k, int(counts[k])),)
        for i, n, j, m in kernel.promising_pairs(*cluster, MIXED_TRIED).tolist():
            yield ((i, n), (j, min(most, m)))

    def simulate(self, parts: Parts, limit_s: float = INFEASIBLE) -> float:
        """The latency of `parts` if it is under limit_s, else infinity."""
        if (known := self._exact.get(parts)) is not None:
            return known if known < limit_s else INFEASIBLE
        if self._at_least.get(parts, 0.0) >= limit_s or self._alone_percentile(parts) >= limit_s:
            return INFEASIBLE
        self.simulations += 1
        work, table = self._work, self._table
        kind = np.repeat(np.array([k for k, _ in parts], np.int64), [count for _, count in parts])
        owner = assign(len(work), kind, self._capacity, self._dispatch)
        arrays = (work.arrival_s, work.input_tokens, work.output_tokens, owner, kind)
        tables = (table.whole, table.rates, table.kx, table.ky, self._alone)
        found: float = kernel.percentile_within(*arrays, *tables, self._percentile, limit_s)
        if found < INFEASIBLE:
            self._exact[parts] = found
        else:
            self._at_least[parts] = limit_s
        return found if found < limit_s else INFEASIBLE

    def _alone_percentile(self, parts: Parts) -> float:
        """Every request alone on the replica, where there is one kind: no simulation can be faster."""
        return self._alone_percentiles[parts[0][0]] if len(parts) == 1 else 0.0


def exhaustive_latency(
    work: Workload, kinds: Sequence[Replica], gpus: int, dispatch: Dispatch, percentile: float
) -> Strategy | None:
    """The best of *every* multiset of replicas on at most `gpus`: exponential, for tests."""
    best: Strategy | None = None

    def extend(parts: tuple[tuple[Replica, int], ...], kind: int, left: int) -> None:
        nonlocal best
        if kind == len(kinds):
            if parts:
                replicas = [replica for replica, count in parts for _ in range(count)]
                served = serve(work, replicas, dispatch)
                latency = float(np.percentile(served.finish_s - work.arrival_s, percentile))
                if best is None or latency < best.latency_s:
                    best = Strategy(parts, latency)
            return
        for count in range(left // kinds[kind].shape.gpus + 1):
            more = (*parts, (kinds[kind], count)) if count else parts
            extend(more, kind + 1, left - count * kinds[kind].shape.gpus)

    extend((), 0, gpus)
    return best
