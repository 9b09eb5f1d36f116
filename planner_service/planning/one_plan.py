"""The best plan under given rules: one search over thresholds and deployments, or several for the highest rate. No I/O."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.planning.cascade_plan import CascadePlan, outcome, with_runs
from penstock.planner_service.planning.deployers import deployer_for
from penstock.planner_service.question.planning_options import Goal, Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.replay.sustained_load import rate_text
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.end_to_end import EndToEnd
from penstock.planner_service.routing.goals import (
    any_within,
    begin_of_least_latency,
    begin_within,
    cheapest,
    least_latency,
    least_work,
    most_quality,
    rounded_down,
    rounded_up,
)
from penstock.planner_service.routing.grid import EPSILON
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.routing.solution import Binds, Solution, Unreachable, too_poor, too_slow
from penstock.types.planning import Objective

TIGHTENED = 8  # times that a limit is lowered because a plan missed it on the other stretches
MARGIN = 0.98  # by which it is lowered beyond what was missed
STARTED_FROM = 50  # routings that are tried for the slowest tier, where a search for what users feel begins
RATE_STEPS = 6  # plans that are made on the way up, and as many on the way down
RATE_GROWTH = 1.5  # from one plan to the next on the way up
MOST_GROWTH = RATE_GROWTH ** (2 * RATE_STEPS - 1)  # of the rate of the trace
RATE_PRECISION = 0.02  # where a higher rate is no longer looked for


class TooManySimulations(Exception):
    """A plan was given up, because it took more simulations than were left."""


class PlanSearch:
    """One command: what the plans that it leads to have in common.

    simulations: of tiers, for all of them so far. most_simulations: after which a plan is given up. begin: thresholds where a
    search begins, as of plans for lower rates, the last one first.
    """

    def __init__(self, site: Site, options: Options, on_evaluation: Callable[[int], None] = lambda _: None) -> None:
        self.site, self.options, self._on_evaluation = site, options, on_evaluation
        self._evaluations = 0
        self.simulations, self.most_simulations = 0, math.inf
        self.begin: list[tuple[float, ...]] = []

    def plan(self, demand: Demand, runs: Sequence[Demand], least_per_s: float = 0.0) -> CascadePlan:
        """The best plan for the goal. least_per_s: for the goal rate, nothing is looked for below this.

        Raises:
            Unreachable: No plan meets the targets, or no tier that is needed fits; it says which target binds.
            TooManySimulations: See `most_simulations`.
        """
        if self.options.aim is Goal.RATE:
            return self._most_rate(demand, runs, least_per_s)
        try:
            return self.checked_plan(demand, runs)
        except Unreachable as error:
            raise self._rate_binds(demand, runs) or error from None

    def checked_plan(self, demand: Demand, runs: Sequence[Demand]) -> CascadePlan:
        """A plan whose latency target holds for the mean of `runs` too: the limit it is planned for is lowered until it
        does."""
        deployer, reasons = self.deployer(demand)
        try:
            return self._checked(demand, runs, deployer, reasons)
        finally:
            self.simulations += deployer.simulations

    def _checked(
        self, demand: Demand, runs: Sequence[Demand], deployer: Deployer, reasons: dict[str, str]
    ) -> CascadePlan:
        """As checked_plan."""
        options = self.options
        limit_s, target_s, least_s = options.max_latency_s, options.max_latency_s, math.inf
        for _ in range(TIGHTENED):
            try:
                plan = self._plan(demand, deployer, reasons, dataclasses.replace(options, max_latency_s=limit_s))
            except Unreachable:
                if limit_s == target_s:
                    raise
                break  # what the other stretches need is out of reach
            plan = with_runs(self.site, plan, runs)
            interval = plan.felt_interval
            if limit_s is None or target_s is None or interval is None or interval.mean <= target_s:
                return plan
            least_s = min(least_s, interval.mean)
            limit_s *= MARGIN * target_s / interval.mean
        why = f"no plan was found whose {options.latency_words} is {target_s:g} s"
        on = f"on {len(runs)} other stretches of the trace"
        raise too_slow(f"{why} {on}: the least was {rounded_up(least_s)} s", least_s)

    def deployer(self, demand: Demand) -> tuple[Deployer, dict[str, str]]:
        """(the deployment solver for a demand, tiers that fit nowhere with the reason)."""
        before, options = self._evaluations, self.options

        def progress(evaluations: int) -> None:
            self._evaluations = before + evaluations
            self._on_evaluation(self._evaluations)
            if self.simulations + deployer.simulations > self.most_simulations:
                raise TooManySimulations

        deployer, reasons = deployer_for(
            self.site,
            demand,
            gpus=options.gpus,
            dispatch=options.dispatch,
            objective=options.objective,
            percentile=options.percentile,
            max_utilisation=options.most_utilisation,
            on_evaluation=progress,
        )
        return deployer, reasons

    def _plan(self, demand: Demand, deployer: Deployer, reasons: dict[str, str], options: Options) -> CascadePlan:
        try:
            solution = self._solve(demand, deployer, options)
        except Unreachable as error:
            if reasons:
                raise Unreachable(f"{error} ({'; '.join(reasons.values())})", error.best, error.binds) from None
            raise
        plan = outcome(self.site, demand, solution, deployer, reasons)
        if options.min_quality is not None and plan.quality < options.min_quality - EPSILON:
            why = f"too few requests for the tier that reaches quality {options.min_quality:g}"
            raise too_poor(f"{why}: the best without it has {rounded_down(plan.quality)}", plan.quality)
        return dataclasses.replace(plan, goal=self.options.aim)

    def _solve(self, demand: Demand, deployer: Deployer, options: Options) -> Solution:
        """The solution for the largest tier, or for what users feel."""
        judged, limit_s, aim = demand.judged, options.max_latency_s, options.aim
        min_quality = options.min_quality or 0.0
        if options.objective is not Objective.LARGEST_TIER:
            return self._felt(demand, deployer, options, min_quality)
        if limit_s is None or aim is Goal.LATENCY:
            solution = least_latency(deployer, min_quality, judged)
            if limit_s is not None and solution.deployment.latency_s > limit_s:
                raise _latency_binds(solution.deployment.latency_s, options, min_quality)
            return solution
        if aim is Goal.COST:
            return cheapest(deployer, min_quality, limit_s, judged)
        if aim is Goal.RATE:
            return any_within(deployer, min_quality, limit_s, judged, self.begin[::-1])
        solution = most_quality(deployer, limit_s, judged)
        if solution.quality < min_quality:
            least_s = least_latency(deployer, min_quality, judged).deployment.latency_s
            raise _latency_binds(least_s, options, min_quality, solution.quality)
        return solution

    def _felt(self, demand: Demand, deployer: Deployer, options: Options, min_quality: float) -> Solution:
        def felt_s(thresholds: Sequence[float], strategies: Sequence[Strategy]) -> float:
            run = run_cascade(self.site, demand, thresholds, strategies, options.dispatch)
            return run.latency_s(options.objective, options.percentile)

        start = self._start(demand.judged, deployer, options, min_quality)
        felt = EndToEnd(deployer, demand.judged, self.site.judge_s, felt_s)
        if (limit_s := options.max_latency_s) is None:
            return felt.least_latency(min_quality, start)
        if options.aim is Goal.COST:
            return felt.cheapest(min_quality, limit_s, start)
        if options.aim is Goal.QUALITY:
            return felt.most_quality(limit_s, min_quality, start)
        solution = felt.least_latency(min_quality, start)
        if (seconds := felt_s(solution.thresholds, solution.deployment.strategies)) > limit_s:
            raise _latency_binds(seconds, options, min_quality)
        return solution

    def _start(self, judged: JudgedSample, deployer: Deployer, options: Options, min_quality: float) -> Sequence[float]:
        """Thresholds where a search for what users feel begins."""
        if options.aim is Goal.RATE and options.max_latency_s is not None:
            # a tier may be slower than what most users feel: twice the limit leaves room for it
            within_s = 2 * options.max_latency_s
            return begin_within(deployer, min_quality, within_s, judged, self.begin[::-1]).thresholds
        if options.aim is Goal.COST:
            return least_work(deployer, min_quality, judged, STARTED_FROM)
        if self.begin and route(judged, self.begin[-1]).quality >= min_quality - EPSILON:
            return self.begin[-1]
        return begin_of_least_latency(deployer, min_quality, judged, STARTED_FROM).thresholds

    def _most_rate(self, demand: Demand, runs: Sequence[Demand], least_per_s: float) -> CascadePlan:
        """The highest rate with a plan that meets both targets: from a rate that works, plans for more and more.

        The rate grows by half as long as a plan meets the targets, then halves the way to the least rate at which none was
        found.
        """
        assert demand.rate_per_s is not None
        best: CascadePlan | None = None
        works, fails, factor = 0.0, math.inf, least_per_s / demand.rate_per_s or 1.0
        failure: Unreachable | None = None
        for _ in range(2 * RATE_STEPS):
            try:
                best = self.checked_plan(demand.scaled(factor), [run.scaled(factor) for run in runs])
                self.begin.append(best.thresholds)
                works = factor
            except Unreachable as error:
                failure, fails = error, factor
                if least_per_s and best is None:
                    break
            if fails < math.inf and works > 0 and fails / works < 1 + RATE_PRECISION:
                break
            if fails == math.inf and works * RATE_GROWTH > MOST_GROWTH * 1.01:
                break
            factor = works * RATE_GROWTH if fails == math.inf else fails / 2 if works == 0 else math.sqrt(works * fails)
        if best is None:
            assert failure is not None
            raise failure
        return best

    def _rate_binds(self, demand: Demand, runs: Sequence[Demand]) -> Unreachable | None:
        """What to say where the targets can be met, but not by a plan that sustains the rate; None where that is not so."""
        options, site = self.options, self.site
        if options.allow_overload or demand.rate_per_s is None:
            return None
        try:
            unbounded = PlanSearch(site, dataclasses.replace(options, allow_overload=True))
            plan = unbounded.checked_plan(demand, runs)
        except Unreachable:
            return None
        if plan.load is None:
            return None
        rate = options.max_utilisation * plan.load.sustained_per_s
        if rate >= demand.rate_per_s:
            return None
        return Unreachable(
            f"the rate binds: {rate_text(demand.rate_per_s)} requests/s are more than any plan of these targets sustains on "
            f"{options.gpus or site.gpus} GPUs at {options.max_utilisation:.0%}; the plan that lets them wait is "
            f"good for {rate_text(rate)}/s, limited by {plan.load.tier}",
            rate,
            Binds.RATE,
        )


def _latency_binds(least_s: float, options: Options, min_quality: float, quality: float | None = None) -> Unreachable:
    limit_s = options.max_latency_s
    within = "" if quality is None else f"; within {limit_s:g} s the most quality is {rounded_down(quality)}"
    why = f"at quality {min_quality:g} the least {options.latency_words} is {rounded_up(least_s)} s, not {limit_s:g} s"
    return too_slow(f"{why}{within}", least_s)
