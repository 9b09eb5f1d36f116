"""Which rules other than thresholds to plan with: all that may be tried, in the order of an estimate that simulates nothing.
No I/O.

Under each choice of rules, judged prompts say exactly which thresholds have the quality, and who reaches which tier there.
What that costs is guessed as the parallelism search guesses: GPUs are shared out in the way that has the least mean latency,
each tier has replicas of one kind, and a request takes its time alone, over the share of their capacity that is left.

Rules of all tiers and best answers are chosen together, tier by tier: for each of the KEPT best choices for the tiers before,
all rules of the next tier are tried. So a rule may be taken that pays only together with another.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from penstock.planner_service.deployment.ranking import LEAST_SPARE
from penstock.planner_service.question.planning_options import Goal, Options
from penstock.planner_service.question.site import Demand
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.grid import EPSILON
from penstock.planner_service.routing.quality import JudgedSample, all_qualities, route
from penstock.planner_service.simulator.felt import Measured, measured_at, percentile_s
from penstock.planner_service.simulator.tier import alone_times
from penstock.planner_service.simulator.workload import Bools, Floats, Ints, Workload
from penstock.services.acceptance.pipeline import joined
from penstock.types.planning import Objective
from penstock.types.rules import AcceptanceRules

KEPT = 8
MOST_ROWS = 512  # of prompts and requests that estimates are made of
MOST_POINTS = 16  # thresholds of a choice of tiers that are asked, of which the best is taken
UNITS = 16  # in which GPUs are shared out
QUALITY_STEPS = 7  # times that the range of the most quality is halved, where that is the goal
SLACK = 1.25  # of a latency target, up to which an estimate may be over it
NONE_S = 1e6  # what a tier takes that cannot serve

Thresholds = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RankedRules:
    """value: what the goal makes least, by the estimate. thresholds: the best ones under these rules."""

    value: float
    thresholds: Thresholds
    rules: AcceptanceRules


@dataclass(frozen=True, slots=True)
class Known:
    """A plan without rules: its thresholds, and the seconds that the objective means."""

    thresholds: Thresholds
    seconds: float


class RuleRanking:
    """Of one question. demand: without the rules that are chosen. deployer: for it."""

    def __init__(
        self, demand: Demand, deployer: Deployer, options: Options, judge_s: float, known: Known | None
    ) -> None:
        self._judged = demand.judged.subset(_evenly(len(demand.judged), MOST_ROWS))
        rows = _evenly(len(demand.requests), MOST_ROWS)
        self._requests = demand.requests.subset(rows)
        self._options, self._judge_s, self._known = options, judge_s, known
        # as if all came within a second where they come all at once
        self._rate_per_s = len(demand.requests) if demand.rate_per_s is None else demand.rate_per_s
        self._units = np.floor(max(1, deployer.gpus) * np.arange(UNITS + 1) / UNITS)  # GPUs of so many units
        last = len(self._requests.tiers) - 1

        def costs(tier: int, *, streamed: bool) -> _TierCosts:
            measured = measured_at(options.objective, streamed=streamed)
            return _TierCosts.of(self._requests, rows, tier, deployer, measured)

        self._tiers = [costs(tier, streamed=tier == last) for tier in range(last + 1)]
        self._last_held = costs(last, streamed=False)
        self._scale = 1.0
        if known is not None and (guess := self._seconds(self._requests, known.thresholds)[0]) > 0:
            self._scale = known.seconds / guess

    def ranked(
        self, choices: Sequence[Sequence[AcceptanceRules]], begin: Iterable[AcceptanceRules]
    ) -> list[RankedRules]:
        """All choices that were estimated, the best first. choices: by tier but the last, rules of that tier alone."""
        known = {rules: self._estimate(rules) for rules in begin}
        best = list(known)
        for of_tier in choices:
            for before, rule in itertools.product(best, of_tier):
                if (both := joined(before, rule)) not in known:
                    known[both] = self._estimate(both)
            best = sorted(known, key=lambda rules: known[rules].value)[:KEPT]
        return sorted(known.values(), key=lambda one: one.value)

    def _estimate(self, rules: AcceptanceRules) -> RankedRules:
        """The best thresholds under these rules, with their value."""
        judged, requests, options = self._judged.under(rules), self._requests.under(rules), self._options
        slack = 1.0 if options.aim is Goal.QUALITY else SLACK
        limit_s = math.inf if options.max_latency_s is None else options.max_latency_s * slack

        def value(thresholds: Thresholds) -> float:
            seconds, gpu_s = self._seconds(requests, thresholds)
            seconds *= self._scale
            over = max(0.0, seconds - limit_s)
            return over * NONE_S + (gpu_s if options.aim in (Goal.COST, Goal.RATE) else seconds)

        def best(quality: float) -> tuple[float, Thresholds]:
            return min(((value(at), at) for at in lowest_thresholds(judged, quality)), default=(math.inf, ()))

        # for the most quality within the limit, between one that is within it and one that is not; else what is nearest to it
        seconds, at = best(options.min_quality or 0.0)
        if options.aim is not Goal.QUALITY or seconds > limit_s:
            return RankedRules(seconds, at, rules)
        most, reached = judged.most, route(judged, at).quality
        for _ in range(QUALITY_STEPS):
            quality = (reached + most) / 2
            seconds, tried = best(quality)
            if seconds > limit_s:
                most = quality
            else:
                reached, at = max(quality, route(judged, tried).quality), tried
        return RankedRules(-reached, at, rules)

    def _seconds(self, requests: JudgedSample, thresholds: Thresholds) -> tuple[float, float]:
        """(the latency that the objective means, GPU seconds of a request), of a guessed deployment."""
        processed = route(requests, thresholds).processed
        used = [tier for tier, reached in enumerate(processed) if reached.any()]
        costs = list(self._tiers)
        if requests.judged_answers(processed)[-1].any():  # the best answer is known when the last one is whole
            costs[-1] = self._last_held
        guesses = [costs[tier].guess(processed[tier], self._rate_per_s, self._units) for tier in used]
        cuts = _splits(len(used))
        if not len(cuts):
            return NONE_S, NONE_S
        mean_s = np.sum([guess.seconds[cuts[:, i]] * guess.share for i, guess in enumerate(guesses)], axis=0)
        chosen = cuts[int(mean_s.argmin())]
        total_s, slowest_s = np.zeros(len(requests)), 0.0
        is_pace = self._options.objective is Objective.PACE
        felt_at = requests.delivered(processed) if is_pace else None
        for tier, guess, units in zip(used, guesses, chosen.tolist(), strict=True):
            each_s = costs[tier].alone_s[guess.kinds[units]] * guess.slowdown[units]
            slowest_s = max(slowest_s, percentile_s(each_s[processed[tier]], self._options.percentile))
            total_s += np.where(processed[tier] if felt_at is None else felt_at == tier, each_s, 0.0)
        gpu_s = sum(guess.gpu_s for guess in guesses)
        if self._options.objective is Objective.LARGEST_TIER:
            return slowest_s, gpu_s
        if not is_pace:
            total_s += requests.judged_s(processed, self._judge_s).sum(axis=0)
        return percentile_s(total_s, self._options.percentile), gpu_s


@dataclass(frozen=True, slots=True, eq=False)
class _Guess:
    """Of a tier with some requests, on each number of units of GPUs (UNITS + 1).

    seconds: mean latency. kinds: of its replicas. slowdown: over the time alone. share: of all requests. gpu_s: of each of
    all requests, on the kind that takes the fewest.
    """

    seconds: Floats
    kinds: Ints
    slowdown: Floats
    share: float
    gpu_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _TierCosts:
    """sizes (K): GPUs of a replica of each kind. busy_s, alone_s (K, N): seconds of each request, on a full and on an idle
    one."""

    sizes: Floats
    busy_s: Floats
    alone_s: Floats
    max_utilisation: float

    @classmethod
    def of(cls, requests: JudgedSample, rows: Ints, tier: int, deployer: Deployer, measured: Measured) -> Self:
        tokens = requests.output_tokens[:, tier]
        work = Workload(np.zeros(len(requests)), requests.input_tokens, tokens)
        kinds = deployer.kinds[tier]
        share = 1.0 if deployer.max_utilisation is None else deployer.max_utilisation
        if not kinds:  # a remote tier, or one that fits nowhere
            alone = np.minimum(deployer.tier_alone_s(tier, measured)[rows], NONE_S)
            return cls(np.zeros(1), np.zeros((1, len(requests))), alone[None], share)
        lengths = list(zip(requests.input_tokens.tolist(), tokens.tolist(), strict=True))
        busy = np.array([[1.0 / kind.capacity_per_s(*each) for each in lengths] for kind in kinds])
        alone = np.array([alone_times(work, kind).measured(measured, tokens) for kind in kinds])
        return cls(np.array([float(kind.shape.gpus) for kind in kinds]), busy, alone, share)

    def guess(self, reached: Bools, all_per_s: float, gpus: Floats) -> _Guess:
        """What the tier does on so many GPUs (U), where these requests reach it. all_per_s: the rate of all requests."""
        count, rate_per_s = int(reached.sum()), all_per_s * float(reached.mean())
        busy_s, alone_s = (each @ reached / count for each in (self.busy_s, self.alone_s))  # (K)
        if not self.sizes.any():
            ones = np.ones(len(gpus))
            return _Guess(alone_s[0] * ones, np.zeros(len(gpus), np.int64), ones, count / len(reached), 0.0)
        replicas = gpus // self.sizes[:, None]  # (K, U)
        with np.errstate(divide="ignore"):
            load = rate_per_s * busy_s[:, None] / replicas / self.max_utilisation
        slowdown = np.maximum(1.0, load / (1 - LEAST_SPARE)) ** 4 / np.maximum(1 - load, LEAST_SPARE)
        seconds = np.minimum(alone_s[:, None] * slowdown, NONE_S)
        kinds = seconds.argmin(axis=0)
        columns, share = np.arange(len(gpus)), count / len(reached)
        gpu_s = float((self.sizes * busy_s).min()) * share
        return _Guess(seconds[kinds, columns], kinds, np.minimum(slowdown[kinds, columns], NONE_S), share, gpu_s)


@functools.cache
def _splits(tiers: int) -> Ints:
    """(S, tiers) all ways to share out UNITS units of GPUs over so many tiers."""
    cuts = itertools.combinations(range(1, UNITS), tiers - 1)
    return np.array([np.diff([0, *cut, UNITS]) for cut in cuts], np.int64).reshape(-1, tiers)


def lowest_thresholds(judged: JudgedSample, quality: float) -> list[Thresholds]:
    """Thresholds with this mean quality of which none can be lowered, for each choice of tiers that are asked; of each choice
    at most MOST_POINTS. Up to three tiers."""
    levels, qualities = all_qualities(judged)
    able = qualities >= quality - EPSILON
    if able.ndim == 0:
        return [()] if able else []
    points: list[tuple[int, ...]] = []
    if able.ndim == 1:
        points = [(int(able.argmax()),)] if able.any() else []
        points += [(len(able) - 1,)] if able[-1] else []
    else:
        rows = [i for i in range(len(able) - 1) if able[i, :-1].any()]
        edge = [(i, int(able[i, :-1].argmax())) for i in rows]
        edge = [point for at, point in enumerate(edge) if not at or point[1] < edge[at - 1][1]]
        points = [edge[i] for i in _evenly(len(edge), MOST_POINTS)] if edge else []
        last = tuple(size - 1 for size in able.shape)
        if able[-1, :-1].any():
            points.append((last[0], int(able[-1, :-1].argmax())))
        if able[:-1, -1].any():
            points.append((int(able[:-1, -1].argmax()), last[1]))
        points += [last] if able[last] else []
    return [tuple(float(level[i]) for level, i in zip(levels, point, strict=True)) for point in points]


def _evenly(count: int, most: int) -> Ints:
    """At most so many of the numbers from 0 to count - 1."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(np.int64))
