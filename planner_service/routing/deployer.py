"""The deployment of a cascade under given thresholds: GPUs and replicas of every tier. No I/O."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypedDict

import numpy as np

from penstock.planner_service.deployment.allocation import ANY_S, allocate, every_split, fewest_within, in_proportion
from penstock.planner_service.deployment.saturation import Sustain, needed_per_s, saturated_per_s
from penstock.planner_service.deployment.search import INFEASIBLE, LatencyTable, Strategy, gpu_counts
from penstock.planner_service.routing.grading import OWN, Grading, TierLoad
from penstock.planner_service.routing.quality import JudgedSample, replies, route
from penstock.planner_service.routing.solution import Deployment
from penstock.planner_service.routing.tier_traffic import TierTraffic
from penstock.planner_service.simulator.felt import Measured, felt_s, latency_words, measured_at
from penstock.planner_service.simulator.tier import Dispatch, Replica, serve
from penstock.planner_service.simulator.workload import Bools, Floats, Ints, Workload
from penstock.types.planning import Objective

FEW = 50  # requests of a tier, of which what it sustains is simulated with them


class DeployerOptions(TypedDict, total=False):
    """See Deployer."""

    dispatch: Dispatch
    percentile: float
    objective: Objective
    max_utilisation: float | None
    on_evaluation: Callable[[int], None]


class Deployer:
    """The deployment solver under any routing, remembering what it has simulated.

    sample: the requests as they arrive, one per row, at `arrival_s` (N, ascending). kinds: of replicas, by tier.
    objective, percentile: which latency is meant, which says what each tier is measured by.
    max_utilisation: of what a tier or a judge model sustains, the share that it may be given; None leaves that open.
    grading: what grades answers as a load; None where that loads nothing.
    """

    table = LatencyTable  # how l(f) is found
    tolerance = 0.0  # the share by which the latency of `deploy` may be over the least

    def __init__(
        self,
        sample: JudgedSample,
        arrival_s: Floats,
        kinds: Sequence[Sequence[Replica]],
        gpus: int,
        *,
        dispatch: Dispatch = Dispatch.CAPACITY,
        percentile: float = 95.0,
        objective: Objective = Objective.LARGEST_TIER,
        max_utilisation: float | None = None,
        grading: Grading | None = None,
        on_evaluation: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.sample, self.gpus, self.dispatch, self.percentile = sample, gpus, dispatch, percentile
        self.objective = objective
        self.kinds, self._on_evaluation = kinds, on_evaluation
        self.max_utilisation, self.grading = max_utilisation, grading
        self._traffic = TierTraffic(sample, arrival_s, grading)
        self._verified: set[int] = set()  # tiers
        self._keeps_up: dict[bytes, bool] = {}
        self._tables: dict[tuple[int, bytes, bytes, Measured, bytes], LatencyTable] = {}
        self._known: dict[tuple[bytes, ...], Deployment | None] = {}
        self._tried: set[tuple[bytes, ...]] = set()
        self._reached: dict[tuple[LatencyTable, ...], float] = {}  # limits within which there are enough GPUs

    @property
    def gpu_step(self) -> int:
        """The largest step between counts of GPUs that a tier may have: 1 where every count is tried."""
        counts = gpu_counts(self.gpus)
        return counts[-1] - counts[-2] if len(counts) > 1 else 1

    @property
    def evaluations(self) -> int:
        """Routings that were looked at."""
        return len(self._tried)

    @property
    def latency_words(self) -> str:
        """The latency that is meant."""
        return latency_words(self.objective, self.percentile)

    @property
    def simulations(self) -> int:
        return sum(table.simulations for table in self._tables.values())

    def deploy(self, thresholds: Sequence[float]) -> Deployment | None:
        """The deployment with the least latency of the slowest tier; None where none fits the GPUs or sustains the rate.

        What tiers sustain is an estimate, in this and all other deployments, until `verify` has been called for them.
        """
        key, tables = self._routed(thresholds)
        if key not in self._known:
            self._known[key] = self._solve(tables)
        return self._known[key]

    def latency_s(self, thresholds: Sequence[float]) -> float:
        deployment = self.deploy(thresholds)
        return INFEASIBLE if deployment is None else deployment.latency_s

    def sustains(self, thresholds: Sequence[float], strategies: Sequence[Strategy]) -> bool:
        """Whether every tier is within max_utilisation, by simulation with the requests that reach it."""
        return not self._overloaded(thresholds, strategies)

    def verify(self, thresholds: Sequence[float], strategies: Sequence[Strategy]) -> None:
        """From now on, verify what the tiers sustain that are over max_utilisation here; under every routing."""
        overloaded = self._overloaded(thresholds, strategies)
        assert not self._verified.issuperset(overloaded), "these were taken before"
        self._verified.update(overloaded)
        for (tier, *_), table in self._tables.items():
            if tier in self._verified:
                table.verify()
        self._forget()

    def _overloaded(self, thresholds: Sequence[float], strategies: Sequence[Strategy]) -> list[int]:
        """The tiers over max_utilisation, by simulation with the requests that reach them."""
        if self.max_utilisation is None:
            return []
        pairs = zip(self._routed(thresholds)[1], strategies, strict=True)
        return [tier for tier, (table, strategy) in enumerate(pairs) if not table.sustains(strategy)]

    def _forget(self) -> None:
        """Forget what was found by estimates alone; tables keep what they have simulated."""
        self._known.clear()
        self._reached.clear()

    @property
    def least_cost(self) -> float:
        """What no deployment of requests costs less than; see `cost`."""
        return 1.0

    def gpu_s(self, thresholds: Sequence[float]) -> float:
        """GPU seconds that all requests take, of each tier on the kind that takes the fewest: of equal costs the less is the
        better, as GPUs that are less busy carry more."""
        return sum(table.gpu_s for table in self._routed(thresholds)[1])

    @functools.cached_property
    def tier_costs_s(self) -> Floats:
        """(C) what each tier costs for all requests, see LatencyTable.least_cost_s; infinite where it cannot serve them."""
        everyone = np.ones((len(self.sample.tiers), len(self.sample)), np.bool_)
        tables = [self._table(tier, row, everyone[:0], Measured.LATENCY) for tier, row in enumerate(everyone)]
        return np.array([table.least_cost_s if table.can_serve else INFEASIBLE for table in tables])

    def cost_at_least(self, thresholds: Sequence[float]) -> float:
        """What no deployment of this routing that sustains the rate costs less than, however slow it is; see `cost`."""
        processed = route(self.sample, thresholds).processed
        loads = [self._traffic.of_tier(tier, processed) for tier in range(len(processed))]
        return sum(self._new_table(tier, load, Measured.LATENCY).least_cost for tier, load in enumerate(loads))

    def cost(self, deployment: Deployment) -> float:
        """What a cheapest plan has least of: GPUs."""
        return float(sum(deployment.gpus))

    def cost_within(self, thresholds: Sequence[float], limit_s: float, under: float = INFEASIBLE) -> float:
        """The least cost with which no tier's latency exceeds limit_s; infinite where it is not under `under`."""
        most = self.gpus if under == INFEASIBLE else math.ceil(under) - 1
        counts = self._counts_within(thresholds, limit_s, min(most, self.gpus))
        return INFEASIBLE if counts is None else float(sum(counts))

    def cheapest_within(self, thresholds: Sequence[float], limit_s: float) -> Deployment | None:
        """The deployment of cost_within; of those that cost the same, one with the best strategy of each tier."""
        counts = self._counts_within(thresholds, limit_s)
        return None if counts is None else self._on(self._routed(thresholds)[1], counts)

    def _counts_within(self, thresholds: Sequence[float], limit_s: float, gpus: int | None = None) -> list[int] | None:
        """The fewest GPUs of each tier with which no latency exceeds limit_s; None where that takes more than `gpus`."""
        _, tables = self._routed(thresholds)
        if not all(table.feasible for table in tables):
            return None
        counts = fewest_within(tables, limit_s, self.gpus if gpus is None else gpus)
        if counts is not None:
            self._reached[tuple(tables)] = min(limit_s, self._reached.get(tuple(tables), ANY_S))
        return counts

    @staticmethod
    def _on(tables: Sequence[LatencyTable], counts: Sequence[int]) -> Deployment | None:
        """The best strategy of each tier on at most so many GPUs; None where a tier that has requests cannot run on its."""
        if not all(table.feasible for table in tables):
            return None
        best = (table.best(count) for table, count in zip(tables, counts, strict=True))
        strategies = [strategy for strategy in best if strategy is not None]
        return Deployment.of(strategies) if len(strategies) == len(tables) else None

    def balanced(self, thresholds: Sequence[float]) -> Deployment | None:
        """All GPUs, in proportion to the work of each tier (largest remainder); None where that does not serve all."""
        return self._balanced(self._routed(thresholds)[1])

    def _balanced(self, tables: Sequence[LatencyTable]) -> Deployment | None:
        """See balanced."""
        if not all(table.feasible for table in tables):
            return None
        counts = in_proportion(tables, self.gpus)
        return None if counts is None else self._on(tables, counts)

    def splits(self, thresholds: Sequence[float]) -> Iterator[Deployment]:
        """All GPUs, shared out over the tiers in every way, in SPLIT_UNITS units; none where there are over SPLIT_MOST."""
        _, tables = self._routed(thresholds)
        yield from filter(None, (self._on(tables, counts) for counts in every_split(tables, self.gpus)))

    def shifted(self, thresholds: Sequence[float], deployment: Deployment) -> Iterator[Deployment]:
        """Deployments with one tier made faster: by spare GPUs, or by those of another tier, which gets slower."""
        _, tables = self._routed(thresholds)
        yield from filter(None, (self._on(tables, counts) for counts in self._shifts(tables, deployment.gpus)))

    def reduced(self, thresholds: Sequence[float], deployment: Deployment) -> Iterator[Deployment]:
        """Deployments that cost less, with one tier made slower."""
        _, tables = self._routed(thresholds)
        for tier, fewer in enumerate(self._fewer(tables, deployment.gpus)):
            lean = None if fewer is None else self._on(tables, _changed(deployment.gpus, {tier: fewer}))
            if lean is not None and sum(lean.gpus) < sum(deployment.gpus):
                yield lean

    def _shifts(self, tables: Sequence[LatencyTable], counts: Sequence[int]) -> Iterator[list[int]]:
        spare = self.gpus - sum(counts)
        for tier, table in enumerate(tables):
            if (more := table.next_better(counts[tier], counts[tier] + spare)) is not None:
                yield _changed(counts, {tier: more})
        for giver, fewer in enumerate(self._fewer(tables, counts)):
            for tier, table in enumerate(tables):
                if fewer is not None and tier != giver:
                    most = counts[tier] + spare + counts[giver] - fewer
                    if (more := table.next_better(counts[tier], most)) is not None:
                        yield _changed(counts, {tier: more, giver: fewer})

    def _fewer(self, tables: Sequence[LatencyTable], counts: Sequence[int]) -> list[int | None]:
        return [table.next_fewer(count) if count else None for table, count in zip(tables, counts, strict=True)]

    def felt_s(self, thresholds: Sequence[float], strategies: Sequence[Strategy], judge_s: float) -> Floats:
        """The objective's latency of each request (see felt.felt_s), as if it came to each tier when it arrives."""
        processed = route(self.sample, thresholds).processed
        latencies, written_s = self.times_s(thresholds, strategies)
        total_s = (latencies + self.sample.judged_s(processed, judge_s)).sum(axis=0)
        return felt_s(self.objective, replies(self.sample, processed), total_s, written_s)

    def times_s(self, thresholds: Sequence[float], strategies: Sequence[Strategy]) -> tuple[Floats, Floats]:
        """((C, N) each request's latency at each tier, (C, N) seconds from the first to the last token of its answer there).

        As if it came to each tier when it arrives; 0 where it does not come. Where a tier grades, the time until an answer is
        graded is part of the latency at the tier that gave it.
        """
        processed = route(self.sample, thresholds).processed
        _, tables = self._routed(thresholds)
        latencies, written_s = np.zeros(processed.shape), np.zeros(processed.shape)
        for tier, (table, strategy) in enumerate(zip(tables, strategies, strict=True)):
            load = self._traffic.of_tier(tier, processed)
            tiers, times = np.where(load.graded == OWN, tier, load.graded), table.times(strategy)
            np.add.at(latencies, (tiers, load.row), times.finish_s)
            written_s[tier, load.row[load.own]] = times.written_s[load.own]
        if self.grading is not None and not self.grading.by_tier:
            load = self._traffic.of_judge(self.grading, processed)
            served = serve(load.work, self.grading.replicas, self.dispatch)
            latencies[load.graded, load.row] += served.finish_s - load.work.arrival_s
        return latencies, written_s

    def tier_latencies_s(
        self, thresholds: Sequence[float], strategies: Sequence[Strategy], percentile: float
    ) -> list[float]:
        """The percentile of each tier's own latencies, each tier by itself, whatever the objective is."""
        _, tables = self._routed(thresholds)
        return [table.latency_percentile_s(one, percentile) for table, one in zip(tables, strategies, strict=True)]

    def alone_s(self, tiers: Sequence[int] | None = None) -> Floats:
        """(C, N) seconds of each request alone on the fastest replica of each of the tiers, of what these are measured by.

        tiers: by number; None for all.
        Infinite where no replica fits. Answers count as streamed, which is less where they are held.
        """
        measured = measured_at(self.objective, streamed=True)
        of = range(len(self.sample.tiers)) if tiers is None else tiers
        return np.array([self.tier_alone_s(tier, measured) for tier in of])

    def tier_alone_s(self, tier: int, measured: Measured) -> Floats:
        """(N) seconds of each request alone on the fastest replica of a tier, with or without drafts, whichever is less.

        Infinite where none fits.
        """
        everyone = np.ones((len(self.sample.tiers), len(self.sample)), np.bool_)
        drafts = self.sample.draft_tokens(tier, everyone)
        least_s = np.full(len(self.sample), INFEASIBLE)
        for each in (0 * drafts, drafts) if drafts.any() else (drafts,):
            table = self._table(tier, everyone[tier], everyone[:0], measured, each)
            least_s = np.minimum(least_s, table.alone_s(measured)) if table.can_serve else least_s
        return least_s

    def workload(self, tier: int, chosen: Bools) -> Workload:
        return self._traffic.load(tier, chosen, chosen[None][:0]).work

    def _routed(self, thresholds: Sequence[float]) -> tuple[tuple[bytes, ...], list[LatencyTable]]:
        """(what tells this routing from others, the table of each tier)."""
        processed = route(self.sample, thresholds).processed
        key = tuple(row.tobytes() for row in processed)
        if key not in self._tried:
            self._tried.add(key)
            self._on_evaluation(len(self._tried))
        if not self._judge_keeps_up(processed):
            return key, [self._unserved] * len(processed)
        tables = []
        for tier, (row, streams) in enumerate(zip(processed, self.sample.streamed(processed), strict=True)):
            answers, drafts = self._traffic.answers(tier, processed), self.sample.draft_tokens(tier, processed)
            measured = measured_at(self.objective, streamed=bool(streams))
            tables.append(self._table(tier, row, answers, measured, drafts))
        return key, tables

    @functools.cached_property
    def _unserved(self) -> LatencyTable:
        """The table of a tier that nothing can serve."""
        everyone = np.ones(len(self.sample), np.bool_)
        return self._unserved_table(self.workload(0, everyone))

    def _judge_keeps_up(self, processed: Bools) -> bool:
        """Whether the replicas of a judge model sustain the answers of a routing; True where a tier grades."""
        grading = self.grading
        if grading is None or grading.by_tier or self.max_utilisation is None or not self._traffic.has_rate:
            return True
        key = self.sample.judged_answers(processed).tobytes()
        if key not in self._keeps_up:
            work = self._traffic.of_judge(grading, processed).work
            needed = needed_per_s(self._traffic.per_s(work), self.max_utilisation)
            self._keeps_up[key] = not len(work) or needed <= grading.sustained_per_s(work)
        return self._keeps_up[key]

    def _table(
        self, tier: int, chosen: Bools, answers: Bools, measured: Measured, drafts: Ints | None = None
    ) -> LatencyTable:
        """measured: what the tier is measured by; one that only grades, by the whole latency."""
        key = (tier, chosen.tobytes(), answers.tobytes(), measured, b"" if drafts is None else drafts.tobytes())
        if key not in self._tables:
            load = self._traffic.load(tier, chosen, answers, drafts)
            self._tables[key] = self._new_table(tier, load, measured if load.own.any() else Measured.LATENCY)
            if tier in self._verified:
                self._tables[key].verify()
        return self._tables[key]

    def _new_table(self, tier: int, load: TierLoad, measured: Measured) -> LatencyTable:
        how = (self.dispatch, self.percentile, self._sustain_of(tier, load.work), load.counted)
        return self.table(load.work, self.kinds[tier], *how, measured)

    def _unserved_table(self, work: Workload) -> LatencyTable:
        return self.table(work, [], self.dispatch, self.percentile)

    def _sustain_of(self, tier: int, work: Workload) -> Sustain | None:
        """What a tier must sustain of the requests that reach it, with the estimate of what its kinds do: few requests may be
        unlike all."""
        if self.max_utilisation is None or not self._traffic.has_rate or not len(work):
            return None
        saturation = self._saturation[tier] if len(work) > FEW else self._saturations(tier, work)
        return Sustain(self._traffic.per_s(work), self.max_utilisation, saturation)

    @functools.cached_property
    def _saturation(self) -> list[Mapping[Replica, float]]:
        """By tier, over all requests: an estimate for those that reach it."""
        everyone = np.ones((len(self.sample.tiers), len(self.sample)), np.bool_)
        return [self._saturations(tier, self._traffic.of_tier(tier, everyone).work) for tier in range(len(everyone))]

    def _saturations(self, tier: int, work: Workload) -> Mapping[Replica, float]:
        """By kind, what simulation says of its arithmetic capacity, for these requests."""
        means = work.mean_tokens
        sustained = zip(self.kinds[tier], saturated_per_s(self.kinds[tier], work), strict=True)
        return {kind: per_s / kind.capacity_per_s(*means) for kind, per_s in sustained}

    def _solve(self, tables: list[LatencyTable]) -> Deployment | None:
        if not all(table.feasible for table in tables):
            return None
        balanced, reachable_s = self._balanced(tables), self._reached.get(tuple(tables), ANY_S)
        if balanced is not None:
            reachable_s = min(reachable_s, balanced.latency_s)

        def slowest_s(counts: Sequence[int]) -> float:
            return max(table.latency_s(count) for table, count in zip(tables, counts, strict=True))

        solved = allocate(lambda limit_s: fewest_within(tables, limit_s, self.gpus), slowest_s, reachable_s)
        return None if solved is None else self._on(tables, solved[0])


def _changed(counts: Sequence[int], changes: Mapping[int, int]) -> list[int]:
    """The GPUs of all tiers, with others for some."""
    return [changes.get(tier, count) for tier, count in enumerate(counts)]
