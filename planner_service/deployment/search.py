"""Parallelism search: the replicas that serve a tier's workload with the least latency on f GPUs. No I/O.

A tier on f GPUs runs a multiset of replicas whose GPUs sum to at most f (CASCADIA, section 3.2); its latency l(f) comes from
the simulator. Searched are all multisets of one kind of replica, and those of two kinds that leave no room for one replica
more of either (every row of the paper's Table 3 is of these), the most promising first: by a bound no simulation can beat
(every request alone on its replica), over what of the replicas' capacity is left. A multiset whose bound is no better than
what has been found is not simulated. `exhaustive_latency` tries every multiset: tests hold one against the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner_service.simulator.tier import Dispatch, KindTable, Replica, alone_latency, assign, serve, serve_kinds
from planner_service.simulator.workload import Floats, Ints, Workload

Parts = tuple[tuple[int, int], ...]  # (kind, count) each
INFEASIBLE = float("inf")
HOPELESS = 20.0  # an overloaded strategy is guessed to be so many times slower than one with capacity to spare
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
            best = self._search(gpus)
            known = [s for f, s in self._found.items() if f < gpus and s is not None]
            least = min(known, key=lambda s: s.latency_s, default=None)
            if least is not None and (best is None or least.latency_s <= best.latency_s):
                best = least
            self._found[gpus] = best
        return self._found[gpus]

    def latency_s(self, gpus: int) -> float:
        found = self.best(gpus)
        return INFEASIBLE if found is None else found.latency_s

    def _search(self, gpus: int) -> Strategy | None:
        best: Strategy | None = None
        for bound, parts in self._candidates(gpus):
            if best is not None and bound >= best.latency_s:
                continue
            latency = self.simulate(parts)
            if best is None or latency < best.latency_s:
                best = Strategy(tuple((self._kinds[k], count) for k, count in parts), latency)
        return best

    def _candidates(self, gpus: int) -> Iterator[tuple[float, Parts]]:
        """(bound, parts): one kind each, then the most promising of two kinds."""
        sizes = self._sizes
        most = len(self._work)  # more replicas than requests serve nobody
        single: list[Parts] = [((k, min(most, gpus // size)),) for k, size in enumerate(sizes.tolist()) if size <= gpus]
        kinds, counts = np.array([p[0][0] for p in single], int), np.array([p[0][1] for p in single], float)
        guesses = self._estimates(kinds, counts, kinds, np.zeros(len(single)))
        for place in np.argsort(guesses, kind="stable").tolist():
            if guesses[place] > HOPELESS * guesses.min():
                break
            yield self._bound(single[place]), single[place]
        first, second = np.triu_indices(len(sizes), 1)
        rows = []
        for i, j in zip(first.tolist(), second.tolist(), strict=True):
            count = np.arange(1, min(most, (gpus - sizes[j]) // sizes[i]) + 1)
            others, unused = np.divmod(gpus - count * sizes[i], sizes[j])
            kept = unused < sizes[i]
            rows.append(np.stack([np.full_like(count, i), count, np.full_like(count, j), others], axis=1)[kept])
        mixed = np.concatenate(rows) if rows else np.zeros((0, 4), np.int64)
        estimates = self._estimates(mixed[:, 0], mixed[:, 1].astype(float), mixed[:, 2], mixed[:, 3].astype(float))
        for at in np.argsort(estimates, kind="stable")[:MIXED_TRIED]:
            i, n, j, m = (int(x) for x in mixed[at])
            parts: Parts = ((i, n), (j, min(most, m)))
            yield self._bound(parts), parts

    def _estimates(self, i: Ints, count: Floats, j: Ints, others: Floats) -> Floats:
        """Mean latency alone, over the share of capacity that is left: an M/M/1-like guess to sort by."""
        one, two = self._capacity[i] * count, self._capacity[j] * others
        total = one + two
        alone = (one * self._alone_means[i] + two * self._alone_means[j]) / total
        load = self._work.rate_per_s / total
        return np.asarray(np.where(load < 0.98, alone / np.maximum(1 - load, 1e-9), alone * 50 * load))

    def _bound(self, parts: Parts) -> float:
        """Every request alone on the replica it is dispatched to: no simulation can be faster."""
        if len(parts) == 1:
            return self._alone_percentiles[parts[0][0]]
        kind = self._kind_of(parts)
        owner = assign(len(self._work), kind, self._capacity, self._dispatch)
        each = self._alone[kind[owner], np.arange(len(self._work))]
        return float(np.percentile(each, self._percentile))

    @staticmethod
    def _kind_of(parts: Parts) -> Ints:
        """(R) the kind of each replica."""
        return np.repeat(np.array([k for k, _ in parts], np.int64), [count for _, count in parts])

    def simulate(self, parts: Parts) -> float:
        """The latency of `parts`."""
        self.simulations += 1
        served = serve_kinds(self._work, self._table, self._kind_of(parts), self._capacity, self._dispatch)
        return float(np.percentile(served.finish_s - self._work.arrival_s, self._percentile))


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
