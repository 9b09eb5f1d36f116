"""Parallelism search on several types of GPU: the replicas, of any types, that serve a tier's workload. No I/O.

With one type, a tier's GPUs are a number, and `search.LatencyTable` has the least latency of each. With several they are a
number of each type, and what counts is what they cost. So the multisets of replicas are ordered by cost, and the first
that is fast enough is the cheapest (as Melange chooses GPU types, by simulation instead of measured rates).

Where there are at most EVERY multisets, all of them are candidates. Else: all of one kind of replica and of two kinds,
of the same type of GPU or of two, in counts up to SINGLE_COUNTS and beyond in steps of 1/COUNT_STEP; of those that take the
same GPUs of each type, the KEPT most promising. Of more than MOST_KINDS kinds, those are kept that serve most per dollar and
those that are fastest, by type.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.planner_service.deployment.ranking import ROUNDING
from penstock.planner_service.deployment.saturation import Sustain
from penstock.planner_service.deployment.search import (
    INFEASIBLE,
    NOTHING,
    LatencyTable,
    Parts,
    Strategy,
    growing_counts,
)
from penstock.planner_service.simulator.felt import Measured
from penstock.planner_service.simulator.tier import Dispatch, Replica
from penstock.planner_service.simulator.workload import Bools, Floats, Ints, Workload

EVERY = 600
SINGLE_COUNTS = 12
COUNT_STEP = 6
KEPT = 2
MOST_KINDS = 12
KINDS_OF_TYPE = 3  # that are kept of each type for what they serve per dollar, and as many for their latency
LEAST_SPARE = 0.1  # of the capacity, in guesses; see ranking.LEAST_SPARE

Room = tuple[int, ...]  # GPUs of each type


@dataclass(frozen=True, slots=True)
class GpuTypes:
    """The types of GPU of a cluster: names, how many there are of each, and what one costs (its price, or 1 for each).

    most: GPUs of all types together that may be used.
    """

    names: tuple[str, ...]
    gpus: Room
    cost: tuple[float, ...]
    most: int

    def of(self, strategy: Strategy) -> Room:
        """GPUs of each type that a strategy takes."""
        taken = [0] * len(self.names)
        for replica, count in strategy.replicas:
            taken[self.names.index(replica.shape.gpu)] += replica.shape.gpus * count
        return tuple(taken)

    def price(self, room: Sequence[int]) -> float:
        return float(sum(n * cost for n, cost in zip(room, self.cost, strict=True)))


class _Candidates(NamedTuple):
    """M multisets of replicas, from the cheapest up. taken (M, P): GPUs of each type. by_guess: from the fastest up."""

    parts: list[Parts]
    taken: Ints
    costs: Floats
    by_guess: list[int]


class MixedTable(LatencyTable):
    """What one tier costs at which latency, under one workload."""

    def __init__(
        self,
        work: Workload,
        kinds: Sequence[Replica],
        dispatch: Dispatch,
        percentile: float,
        sustain: Sustain | None,
        types: GpuTypes,
        counted: Bools | None = None,
        measured: Measured = Measured.LATENCY,
    ) -> None:
        super().__init__(work, kinds, dispatch, percentile, sustain, counted, measured)
        self.types = types
        self._type = np.array([types.names.index(kind.shape.gpu) for kind in self._kinds], np.int64)
        self._options: dict[float, tuple[list[int], Iterator[int]]] = {}

    @property
    def least_cost_s(self) -> float:
        prices = self._sizes * np.array(self.types.cost)[self._type]
        if not len(self._work) or not prices.all() or not self._kinds:
            return 0.0
        return len(self._work) / float((self._capacity / prices).max())

    @property
    def least_cost(self) -> float:
        if not len(self._work):
            return 0.0
        if not self._kinds:
            return INFEASIBLE
        prices = self._sizes * np.array(self.types.cost)[self._type]
        return float(max(prices.min(), self._needed_per_s * (prices / self._sustained).min() * (1 - ROUNDING)))

    @property
    def least_alone_s(self) -> float:
        """What no replicas can beat: the percentile of each request alone on the kind that is fastest for it."""
        return self._percentile_s(self.alone_s()) if len(self._work) else 0.0

    def option(self, limit_s: float, number: int) -> tuple[Strategy, Room, float] | None:
        """(strategy, GPUs of each type, cost) of the number-th cheapest candidate whose latency is at most limit_s, of those
        of which no cheaper one takes as few GPUs of every type; None where there are no more."""
        if not len(self._work):
            return None if number else (NOTHING, (0,) * len(self.types.names), 0.0)
        if limit_s not in self._options:
            self._options[limit_s] = ([], self._within(limit_s))
        known, more = self._options[limit_s]
        while len(known) <= number:
            if (following := next(more, None)) is None:
                return None
            known.append(following)
        m = known[number]
        parts, taken, costs, _ = self._listed
        return self._strategy(parts[m], self.simulate(parts[m])), tuple(taken[m].tolist()), float(costs[m])

    def fastest(self, room: Sequence[int], most: int, under_cost: float = INFEASIBLE) -> Strategy | None:
        """The candidate with the least latency in this room, on at most so many GPUs, that costs less than under_cost."""
        if not len(self._work):
            return NOTHING
        parts, taken, costs, by_guess = self._listed
        able = self._fits(taken, room, most) & (costs < under_cost)
        best, seconds = None, INFEASIBLE
        for m in by_guess:
            if able[m] and (latency := self._sustaining_s(parts[m], seconds)) < seconds:
                best, seconds = m, latency
        return None if best is None else self._strategy(parts[best], seconds)

    def faster(self, room: Sequence[int], most: int, than_s: float) -> Strategy | None:
        """The cheapest candidate in this room, on at most so many GPUs, with a latency under than_s."""
        if not len(self._work):
            return None
        parts = self._listed.parts
        for m in np.flatnonzero(self._fits(self._listed.taken, room, most)).tolist():
            if (latency := self._sustaining_s(parts[m], than_s)) < than_s:
                return self._strategy(parts[m], latency)
        return None

    @staticmethod
    def _fits(taken: Ints, room: Sequence[int], most: int) -> Bools:
        """(M) whether what is taken, (M, P) GPUs of each type, is within a room and within so many GPUs."""
        return np.asarray((taken <= np.array(room)).all(axis=1) & (taken.sum(axis=1) <= most))

    def _within(self, limit_s: float) -> Iterator[int]:
        under = float(np.nextafter(limit_s, INFEASIBLE))
        taken = self._listed.taken
        superfluous = np.zeros(len(taken), np.bool_)
        for m, parts in enumerate(self._listed.parts):
            if not superfluous[m] and self._sustaining_s(parts, under) < under:
                superfluous |= (taken >= taken[m]).all(axis=1)
                yield m

    def _forget(self) -> None:
        super()._forget()
        self._options.clear()

    @functools.cached_property
    def _listed(self) -> _Candidates:
        parts, guesses = self._every() or self._promising()
        taken = np.array([self._gpus_of(one) for one in parts], np.int64).reshape(-1, len(self.types.names))
        costs = taken @ np.array(self.types.cost)
        order = np.lexsort((np.array(guesses), taken.sum(axis=1), costs))
        by_guess = np.argsort(np.array(guesses)[order], kind="stable").tolist()
        return _Candidates([parts[m] for m in order], taken[order], costs[order], by_guess)

    def _every(self) -> tuple[list[Parts], list[float]] | None:
        """All multisets that fit and sustain the rate, with guesses; None where there are more than EVERY."""
        combined: list[Parts] = [()]
        for k, size in enumerate(self._sizes.tolist()):
            longer, type_ = [], self._type[k]
            for parts in combined:
                taken = self._gpus_of(parts)
                left = min(self.types.gpus[type_] - taken[type_], self.types.most - taken.sum())
                longer += [(*parts, (k, n)) if n else parts for n in range(left // size + 1)]
            combined = longer
            if len(combined) > EVERY:
                return None
        sustaining = [parts for parts in combined if parts and self._sustains(parts)]
        return sustaining, [self._guess(parts) for parts in sustaining]

    def _gpus_of(self, parts: Parts) -> Ints:
        """(P) GPUs of each type that replicas take."""
        taken = np.zeros(len(self.types.names), np.int64)
        for k, n in parts:
            taken[self._type[k]] += n * self._sizes[k]
        return taken

    def _guess(self, parts: Parts) -> float:
        capacity = sum(float(self._sustained[k]) * n for k, n in parts)
        alone = sum(float(self._sustained[k]) * n * float(self._alone_means[k]) for k, n in parts)
        return float(self._guesses(np.array([capacity]), np.array([alone]))[0])

    def _guesses(self, capacity: Floats, alone: Floats) -> Floats:
        """Latencies to sort by. alone: the sum over replicas of capacity times mean latency alone."""
        with np.errstate(divide="ignore", invalid="ignore"):
            load = self._work.rate_per_s / capacity
            guess = alone / capacity / np.maximum(1 - load, LEAST_SPARE)
        return np.asarray(guess + np.maximum(0.0, load - 1) * self._alone_means.max())

    def _promising(self) -> tuple[list[Parts], list[float]]:
        """One kind and two kinds, the best KEPT of each number of GPUs of each type."""
        best: dict[bytes, list[tuple[float, Parts]]] = {}
        kinds = self._kinds_kept()
        for place, i in enumerate(kinds):
            for j in kinds[place:]:
                for parts, guess, taken in self._of_two(i, j):
                    few = best.setdefault(taken, [])
                    few.append((guess, parts))
        most_promising = [one for few in best.values() for one in sorted(few)[:KEPT]]
        return [parts for _, parts in most_promising], [guess for guess, _ in most_promising]

    def _of_two(self, i: int, j: int) -> Iterator[tuple[Parts, float, bytes]]:
        """(replicas, guess, GPUs taken of each type) of kinds i and j, or of i alone where both are the same."""
        counts = [np.array(self._counts_of(k), np.int64) for k in (i, j)]
        n, m = (
            a.ravel() for a in np.meshgrid(counts[0], counts[1] if j != i else np.zeros(1, np.int64), indexing="ij")
        )
        taken = np.zeros((len(n), len(self.types.names)), np.int64)
        taken[:, self._type[i]] += n * self._sizes[i]
        taken[:, self._type[j]] += m * self._sizes[j]
        capacity = n * self._sustained[i] + m * self._sustained[j]
        alone = n * self._sustained[i] * self._alone_means[i] + m * self._sustained[j] * self._alone_means[j]
        guess, fits = self._guesses(capacity, alone), self._fits(taken, self.types.gpus, self.types.most)
        fits &= capacity * (1 + 1e-9) >= self._needed_per_s
        for at in np.flatnonzero(fits).tolist():
            parts: Parts = ((i, int(n[at])),) if j == i else ((i, int(n[at])), (j, int(m[at])))
            if self._sustains(parts):
                yield parts, float(guess[at]), taken[at].tobytes()

    def _counts_of(self, kind: int) -> list[int]:
        """Numbers of replicas of a kind that are tried."""
        room = min(self.types.gpus[self._type[kind]], self.types.most)
        return growing_counts(min(room // int(self._sizes[kind]), len(self._work)), SINGLE_COUNTS, COUNT_STEP)

    def _kinds_kept(self) -> list[int]:
        if len(self._kinds) <= MOST_KINDS:
            return list(range(len(self._kinds)))
        per_gpu = self._sustained / self._sizes
        selected = set[int]()
        for t in range(len(self.types.names)):
            of_type = np.flatnonzero(self._type == t)
            for order in (-per_gpu, self._alone_means):
                selected.update(of_type[np.argsort(order[of_type], kind="stable")][:KINDS_OF_TYPE].tolist())
        return sorted(selected)
