"""Parallelism search: the replicas that serve a tier's workload with the least latency on f GPUs. No I/O.

A tier on f GPUs runs a multiset of replicas whose GPUs sum to at most f (CASCADIA, section 3.2); its latency l(f) comes
from the simulator. Searched are, for every count of GPUs up to f (`gpu_counts`), all multisets of one kind of replica,
and the most promising of two kinds that leave no room for one more. So l(f) is non-increasing, and does
not depend on what was asked before. It is the best of what is searched, not of all multisets: tests hold
it against those.

Where a rate is given that the tier must sustain, strategies that do not are left out: by an estimate of what each kind
sustains (`Sustain`), and after `verify` also by simulation with the tier's own requests, of each strategy that would be
taken. So l(f) can only grow by that. A strategy that the estimate excludes is not looked at, though it may sustain the rate.

No multiset is simulated twice, and none further than until so many requests are late that its percentile cannot be under
the best one known (kernel.percentile_within): nothing is lost by that.
"""

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.deployment import ranking
from penstock.planner_service.deployment.ranking import ROUNDING
from penstock.planner_service.deployment.saturation import Sustain, needed_per_s, saturated_per_s, together_per_s
from penstock.planner_service.simulator import kernel
from penstock.planner_service.simulator.felt import Measured, percentile_s
from penstock.planner_service.simulator.remote import RemoteTier
from penstock.planner_service.simulator.tier import KindTable, Replica, Times, alone_times, assign, serve_kinds
from penstock.planner_service.simulator.workload import Bools, Floats, Workload
from penstock.types.planning import Dispatch

Parts = tuple[tuple[int, int], ...]  # (kind, count) each
INFEASIBLE = float("inf")
PAIRS_TRIED = 12  # multisets of two kinds that are simulated for one f
SINGLE_COUNTS = 128  # every count of GPUs up to here is tried, beyond it one in COUNT_STEPS of the count
COUNT_STEPS = 64
ALONE_SHARE = 1 - 1e-9  # of the pace alone: what is left of rounding, as simulated paces are differences of times
WINDOW = 7 / 8
"""Of a count that is asked for: from there on l(f) is found of every count, as those next to it are asked soon."""


@functools.cache
def gpu_counts(most: int) -> tuple[int, ...]:
    """The counts of GPUs a tier may have, from 1 to at most `most`: beyond SINGLE_COUNTS in steps of about 1.6 %."""
    return tuple(growing_counts(most, SINGLE_COUNTS, COUNT_STEPS))


def growing_counts(most: int, single: int, steps: int) -> list[int]:
    """From 1 to at most `most`: every count up to `single`, then each by one in `steps` more than the one before."""
    counts = list(range(1, min(most, single) + 1))
    while counts and counts[-1] >= single and counts[-1] + counts[-1] // steps <= most:
        counts.append(counts[-1] + counts[-1] // steps)
    return counts


@dataclass(frozen=True, slots=True)
class Strategy:
    """Replicas by kind with their counts; none for a tier without GPUs. latency_s: at the percentile asked for.

    remote: what serves instead of replicas, and remote_dollars_per_hour what its tokens cost.
    """

    replicas: tuple[tuple[Replica, int], ...]
    latency_s: float
    remote: RemoteTier | None = None
    remote_dollars_per_hour: float = 0.0

    @property
    def used(self) -> bool:
        """Whether anything serves."""
        return bool(self.replicas) or self.remote is not None

    @property
    def gpus(self) -> int:
        return sum(replica.shape.gpus * count for replica, count in self.replicas)

    def __str__(self) -> str:
        def one(replica: Replica, count: int) -> str:
            return f"({f'DP={count}, ' if count > 1 else ''}{replica.shape})"

        return "remote" if self.remote is not None else ", ".join(one(*part) for part in self.replicas) or "-"


NOTHING = Strategy((), 0.0)


class LatencyTable:
    """l(f) of one tier under one workload, computed where it is asked for, non-increasing in f."""

    def __init__(
        self,
        work: Workload,
        kinds: Sequence[Replica],
        dispatch: Dispatch,
        percentile: float,
        sustain: Sustain | None = None,
        counted: Bools | None = None,
        measured: Measured = Measured.LATENCY,
    ) -> None:
        """kinds: replicas that fit; those without room for the longest request are left out.

        counted (N): the requests whose latency counts, at least one of them; None for all. measured: what latency is; where
        it is the pace, answers of one token do not count, unless all have one.
        """
        self._counted = self._whole_counted = np.ones(len(work), np.bool_) if counted is None else counted
        self._measured = measured
        if measured is Measured.PACE and (several := self._counted & (work.output_tokens > 1)).any():
            self._counted = several
        self._work, self._dispatch, self._percentile = work, dispatch, percentile
        self._kinds = [kind for kind in kinds if kind.request_tokens >= work.longest_tokens]
        self._best: dict[int, Strategy | None] = {0: None}  # l(f) of the counts that were asked for
        self._parts: dict[int, list[Parts]] = {}
        self._exact: dict[Parts, float] = {}  # latencies
        self._at_least: dict[Parts, float] = {}  # bounds of those that were given up
        self._each: dict[Parts, Times] = {}
        self._missed: tuple[float, int] = (0.0, 0)  # a limit, and the GPUs below which nothing is within it
        self.simulations = 0
        means = work.mean_tokens if len(work) else (1.0, 1.0, 0.0)
        self._table = KindTable(self._kinds)
        self._sizes = np.array([kind.shape.gpus for kind in self._kinds], np.int64)
        self._capacity = np.array([kind.capacity_per_s(*means) for kind in self._kinds])
        self._sustained, self._needed_per_s = self._capacity, 0.0  # (K), and what is needed of them
        self._saturated: dict[int, float] = {}  # what a kind sustains of these requests, where it was asked for
        self._verified = False
        if sustain is not None and len(work):
            self._sustained = self._capacity * np.array([sustain.saturation[kind] for kind in self._kinds])
            self._needed_per_s = needed_per_s(sustain.per_s, sustain.max_utilisation)

    @property
    def least_gpus(self) -> int:
        """The fewest GPUs that can serve; 0 for no requests. ValueError where no kind fits."""
        return min(kind.shape.gpus for kind in self._kinds) if len(self._work) else 0

    @functools.cached_property
    def least_sustaining_gpus(self) -> int:
        """What no strategy that sustains the rate needs fewer GPUs than; 0 for no requests, or where no kind fits.

        Replicas sustain together at most the sum of what each sustains; by the estimates, which a strategy has to satisfy
        too.
        """
        if not self._kinds:
            return 0
        if not len(self._work) or self._needed_per_s == 0.0:
            return self.least_gpus
        best: dict[int, float] = {}  # by size, what one replica sustains at most
        for size, per_s in zip(self._sizes.tolist(), self._sustained.tolist(), strict=True):
            best[size] = max(per_s, best.get(size, 0.0))
        if max(best.values(), default=0.0) <= 0:
            raise ValueError("nothing sustains such requests")
        most, needed = [0.0], self._needed_per_s * (1 - ROUNDING)  # of 0, 1 ... GPUs together
        while most[-1] < needed:
            gpus = len(most)
            most.append(max((most[gpus - size] + per_s for size, per_s in best.items() if size <= gpus), default=0.0))
        return len(most) - 1

    @property
    def least_cost(self) -> float:
        """What no strategy that sustains the rate costs less than, see Deployer.cost; infinite where nothing can serve."""
        return float(self.least_sustaining_gpus) if self.can_serve else INFEASIBLE

    def sustains(self, strategy: Strategy) -> bool:
        """Whether a strategy of this table sustains the rate, by simulation with the table's own requests."""
        if self._needed_per_s == 0.0 or not strategy.replicas:
            return True
        return self._sustains_own(self._parts_of(strategy))

    def verify(self) -> None:
        """From now on, leave out strategies that do not sustain the rate by that simulation."""
        if not self._verified:
            self._verified = True
            self._forget()

    def _forget(self) -> None:
        """Forget what was found by the estimate alone; simulated latencies stay."""
        self._best = {0: None}
        self._missed = (0.0, 0)

    @property
    def gpu_s(self) -> float:
        """GPU seconds that its requests take on the kind that takes the fewest; 0 for no requests."""
        if not len(self._work) or not self._kinds:
            return 0.0
        return len(self._work) / float((self._capacity / self._sizes).max())

    @property
    def least_cost_s(self) -> float:
        """Cost times seconds of replicas that are always busy with its requests, on the kind that costs the least; 0 for no
        requests."""
        return self.gpu_s

    @property
    def can_serve(self) -> bool:
        """Whether there is anything that serves such requests, however few."""
        return bool(self._kinds) or not len(self._work)

    @property
    def feasible(self) -> bool:
        return self.can_serve

    def alone_s(self, measured: Measured | None = None) -> Floats:
        """(N) seconds of each request alone on the kind that is fastest for it.

        measured: of what; None for what the table measures.
        """
        return np.asarray(np.min(self._alone_of(self._measured if measured is None else measured), axis=0))

    @functools.cached_property
    def _alone_times(self) -> list[Times]:
        return [alone_times(self._work, kind) for kind in self._kinds]

    @functools.cached_property
    def _alone(self) -> Floats:
        """(K, N) under what simulation says of each."""
        return self._alone_of(self._measured) * (1 - ROUNDING)

    @functools.cached_property
    def _alone_means(self) -> Floats:
        """(K) of whole latencies."""
        return self._alone_of(Measured.LATENCY).mean(axis=1) if len(self._work) else np.zeros(len(self._kinds))

    @functools.cached_property
    def _alone_percentiles(self) -> list[float]:
        return [self._percentile_s(each) for each in self._alone]

    def _alone_of(self, measured: Measured) -> Floats:
        """(K, N) seconds of each request alone on each kind."""
        share = ALONE_SHARE if measured is Measured.PACE else 1.0
        rows = [times.measured(measured, self._work.output_tokens) * share for times in self._alone_times]
        return np.array(rows).reshape(len(self._kinds), len(self._work))

    def best(self, gpus: int) -> Strategy | None:
        """The best strategy on at most `gpus`; None where nothing fits, or nothing sustains the rate."""
        if not len(self._work):
            return NOTHING
        counts = gpu_counts(gpus)
        most = counts[-1] if counts else 0
        if most not in self._best:
            begin = self._counts(1, int(most * WINDOW))
            if begin and begin[-1] > self._known_under(most):
                self._best[begin[-1]] = self._found(begin[-1])
            for count in self._counts(self._known_under(most) + 1, most):
                self._best[count] = self._found(count)
        return self._best[most]

    def _known_under(self, count: int) -> int:
        """The most GPUs under `count` of which l(f) is known."""
        return max(known for known in self._best if known < count)

    def _found(self, most: int) -> Strategy | None:
        """The best strategy on at most so many GPUs, of those equal the one on fewer: the largest counts are tried first, as
        what is fast ends the simulations of what is not."""
        known = self._known_under(most)
        best = self._best[known]
        latency_s, on = (INFEASIBLE if best is None else best.latency_s), known
        for count in reversed(self._counts(max(known + 1, self.least_sustaining_gpus), most)):
            for parts in self._candidates(count):
                # what was found on more GPUs need only be equalled, what is known on fewer must be beaten
                under = math.nextafter(latency_s, INFEASIBLE) if on > count else latency_s
                if (seconds := self._sustaining_s(parts, under)) < under:
                    latency_s, on, best = seconds, count, self._strategy(parts, seconds)
        return best

    def latency_s(self, gpus: int) -> float:
        strategy = self.best(gpus)
        return INFEASIBLE if strategy is None else strategy.latency_s

    def least_gpus_within(self, limit_s: float, most: int) -> int | None:
        """The fewest GPUs f <= most with l(f) <= limit_s; None where there are none. Cheaper than l(f) itself."""
        if not len(self._work):
            return 0
        if not self._kinds or (min(self._alone_percentiles) > limit_s and len(self._kinds) == 1):
            return None
        under = math.nextafter(limit_s, INFEASIBLE)
        for count in self._counts(self.fewest_known(limit_s), most):
            if count in self._best:
                if self.latency_s(count) <= limit_s:
                    return count
            elif any(self._sustaining_s(parts, under) < under for parts in self._candidates(count)):
                return count
            self._missed = (limit_s, count + 1)
        return None

    def fewest_known(self, limit_s: float) -> int:
        """GPUs than which no fewer are within a limit, by what has been simulated so far."""
        if not len(self._work):
            return 0
        missed = self._missed[1] if limit_s <= self._missed[0] else 0
        slower = (count + 1 for count, best in self._best.items() if best is None or best.latency_s > limit_s)
        return max(missed, self.least_sustaining_gpus, *slower)

    def next_better(self, gpus: int, most: int) -> int | None:
        """The fewest GPUs over `gpus`, at most `most`, that make the tier faster than `gpus` do."""
        seconds = self.latency_s(gpus)
        return self.least_gpus_within(math.nextafter(seconds, 0.0), most) if seconds > 0.0 else None

    def next_fewer(self, gpus: int) -> int | None:
        """The most GPUs under `gpus` that are still enough to serve, and with which the tier is slower."""
        enough = self.least_gpus_within(self.latency_s(gpus), gpus)
        fewer = self._counts(1, enough - 1) if enough is not None else ()
        return fewer[-1] if fewer and self.latency_s(fewer[-1]) < INFEASIBLE else None

    def times(self, strategy: Strategy) -> Times:
        """Of each request, under a strategy of this table."""
        if not len(self._work):
            return Times(np.zeros(0), np.zeros(0))
        parts = self._parts_of(strategy)
        if parts not in self._each:
            kind = np.repeat(np.array([k for k, _ in parts], np.int64), [count for _, count in parts])
            served = serve_kinds(self._work, self._table, kind, self._capacity, self._dispatch)
            self._each[parts] = Times(served.first_s - self._work.arrival_s, served.finish_s - self._work.arrival_s)
        return self._each[parts]

    def latency_percentile_s(self, strategy: Strategy, percentile: float) -> float:
        """Of the whole latencies of the requests that count, under a strategy of this table, whatever the table measures."""
        if (self._measured, self._percentile) == (Measured.LATENCY, percentile):
            return strategy.latency_s
        return percentile_s(self.times(strategy).finish_s[self._whole_counted], percentile)

    def _counts(self, least: int, most: int) -> Sequence[int]:
        counts = gpu_counts(most)
        return counts[bisect.bisect_left(counts, least) :]

    def _strategy(self, parts: Parts, latency_s: float) -> Strategy:
        return Strategy(tuple((self._kinds[k], count) for k, count in parts), latency_s)

    def _parts_of(self, strategy: Strategy) -> Parts:
        return tuple((self._kinds.index(replica), count) for replica, count in strategy.replicas)

    def _candidates(self, gpus: int) -> list[Parts]:
        """One kind each, then the most promising of two; those that sustain the rate."""
        if gpus not in self._parts:
            most = len(self._work)  # more replicas than requests are idle
            span_s = float(self._work.arrival_s[-1] - self._work.arrival_s[0])
            kinds = ranking.Kinds(self._sizes, self._sustained, self._alone_means, self._work.rate_per_s, span_s)
            counts, guesses = ranking.single_estimates(kinds, gpus, most)
            order = np.argsort(guesses, kind="stable").tolist()
            every: list[Parts] = [((k, int(counts[k])),) for k in order if counts[k]]
            pairs = ranking.promising_pairs(kinds, gpus, most, PAIRS_TRIED)
            every += [((i, n), (j, min(most, m))) for i, n, j, m in pairs.tolist()]
            self._parts[gpus] = [parts for parts in every if self._sustains(parts)]
        return self._parts[gpus]

    def _sustains(self, parts: Parts) -> bool:
        """Whether, by the estimates, no replica is given more than it sustains at the rate needed."""
        return self._needed_per_s == 0.0 or self._together_per_s(parts, self._sustained) >= self._needed_per_s

    def _together_per_s(self, parts: Parts, saturated: Floats | Mapping[int, float]) -> float:
        """The rate that `parts` sustain. saturated: by kind, what one replica does."""
        return together_per_s(
            [n for _, n in parts],
            [float(saturated[k]) for k, _ in parts],
            [float(self._capacity[k]) for k, _ in parts],
            self._dispatch,
        )

    def _sustains_own(self, parts: Parts) -> bool:
        """As _sustains, by what kinds sustain of the table's own requests."""
        unknown = [k for k, _ in parts if k not in self._saturated]
        saturated = saturated_per_s([self._kinds[k] for k in unknown], self._work) if unknown else []
        self._saturated.update(zip(unknown, saturated, strict=True))
        return self._together_per_s(parts, self._saturated) >= self._needed_per_s

    def _sustaining_s(self, parts: Parts, limit_s: float) -> float:
        """The latency of `parts` if it is under limit_s and, where that is verified, they sustain the rate; else infinity.

        What kinds sustain takes long to simulate: it is asked of what is fast enough.
        """
        if not self._verified or self._needed_per_s == 0.0:
            return self.simulate(parts, limit_s)
        if all(k in self._saturated for k, _ in parts) and not self._sustains_own(parts):
            return INFEASIBLE
        latency_s = self.simulate(parts, limit_s)
        return latency_s if latency_s < limit_s and self._sustains_own(parts) else INFEASIBLE

    def simulate(self, parts: Parts, limit_s: float = INFEASIBLE) -> float:
        """The latency of `parts` if it is under limit_s, else infinity."""
        if (known := self._exact.get(parts)) is not None:
            return known if known < limit_s else INFEASIBLE
        # of one kind no simulation can be faster than every request alone on the replica
        alone_s = self._alone_percentiles[parts[0][0]] if len(parts) == 1 else 0.0
        if max(self._at_least.get(parts, 0.0), alone_s) >= limit_s:
            return INFEASIBLE
        self.simulations += 1
        work = self._work
        kind = np.repeat(np.array([k for k, _ in parts], np.int64), [count for _, count in parts])
        owner = assign(work.priority, kind, self._capacity, self._dispatch)
        latency = kernel.percentile_within(
            work.arrivals,
            self._table.tier(owner, kind),
            self._alone,
            self._counted,
            self._percentile,
            limit_s,
            int(self._measured),
        )
        if latency < INFEASIBLE:
            self._exact[parts] = latency
        else:
            self._at_least[parts] = limit_s
        return latency if latency < limit_s else INFEASIBLE

    def _percentile_s(self, seconds: Floats) -> float:
        """The percentile of (N) seconds, of the requests that count."""
        return percentile_s(seconds[self._counted], self._percentile)
