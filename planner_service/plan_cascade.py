"""A cascade plan from a cluster, models, arrivals and judged prompts: what `penstock plan` computes. No I/O."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from planner_service.burst_ladder import NoLadder, burst_ladder
from planner_service.cascade_choice import Tiers, best_cascade
from planner_service.cascade_plan import CascadePlan, outcome, with_runs
from planner_service.cascade_simulation import run_cascade
from planner_service.deployers import deployer_for
from planner_service.deployment.search import Strategy
from planner_service.planned_rules import with_best_answer, with_early_checks, with_long_answers, with_skip_rule
from planner_service.planning_options import Budget, Goal, Options
from planner_service.routing.confidence import Promise, promised
from planner_service.routing.deployer import Deployer
from planner_service.routing.end_to_end import EndToEnd
from planner_service.routing.goals import (
    any_within,
    begin_of_least_latency,
    begin_within,
    cheapest,
    least_latency,
    most_quality,
    rounded_down,
    rounded_up,
    sustaining,
)
from planner_service.routing.mixed_deployer import EXACT_IS_FOR_ONE
from planner_service.routing.solution import Binds, Solution, Unreachable
from planner_service.simulator.felt import Objective
from planner_service.site import Demand, Site
from planner_service.sustained_load import rate_text
from services.domain.errors import invalid

NO_LADDER_WITH = "not where what judges is stated, or with remote tiers: steps of the ladder do not count their load"
TIGHTENED = 8  # times that a limit is lowered because a plan missed it on the other stretches
MARGIN = 0.98  # by which it is lowered beyond what was missed
STARTED_FROM = 50  # routings that are tried for the slowest tier, where a search for what users feel begins
RATE_STEPS = 6  # plans that are made on the way up, and as many on the way down
RATE_PRECISION = 0.02  # where a higher rate is no longer looked for


def plan_cascade(
    site: Site,
    demand: Demand,
    options: Options | None = None,
    *,
    runs: Sequence[Demand] = (),
    on_evaluation: Callable[[int], None] = lambda _: None,
    **fields: object,
) -> CascadePlan:
    """The best plan for a goal within the targets.

    options: see Options; `fields` are its fields by name. runs: other stretches of the same workload, on which the plan
    is run when it is found; a latency target has to hold for their mean.

    Raises:
        InvalidRequest: options that do not go together, one out of bounds, more GPUs than there are, or fewer requests
            than the percentile needs.
        Unreachable: no plan meets the targets, or no tier that is needed fits; it says which target binds.
    """
    options = dataclasses.replace(options or Options(), **fields)  # type: ignore[arg-type]
    options.check(len(site.tiers))
    if len(demand.arrival_s) < options.least_requests:
        least = options.least_requests
        raise invalid("requests", f"must be at least {least} to plan on, not {len(demand.arrival_s)}")
    if options.budget is Budget.EXACT and (site.more or site.remotes):
        raise invalid("budget", EXACT_IS_FOR_ONE)
    if options.burst_floor is not None:
        if site.grading is not None or site.remotes:
            raise invalid("burst_floor", NO_LADDER_WITH)
        without = dataclasses.replace(options, burst_floor=None, burst_mean=None)
        plan = plan_cascade(site, demand, without, runs=runs, on_evaluation=on_evaluation)
        return _with_burst_ladder(plan, chosen_of(plan, site, demand)[1], options, options.burst_floor)

    def plan_within(demand: Demand, runs: Sequence[Demand], options: Options) -> CascadePlan:
        return plan_cascade(site, demand, options, runs=runs, on_evaluation=on_evaluation)

    if options.early_error is not None:
        return with_early_checks(plan_within, site, demand, runs, options, options.early_error)
    if options.max_tiers is not None:
        return _with_chosen_tiers(site, demand, options, runs, on_evaluation)
    if options.best_answer:
        return with_best_answer(plan_within, demand, runs, options)
    if options.long_answers:
        return with_long_answers(plan_within, demand, runs, options)
    if options.skip:
        return with_skip_rule(plan_within, demand, runs, options)
    planner = _Planner(site, options, on_evaluation)
    if options.aim is Goal.RATE:
        return _most_rate(planner, demand, runs)
    try:
        return planner.checked_plan(demand, runs)
    except Unreachable as error:
        raise _rate_binds(site, demand, options, runs) or error from None


def chosen_of(plan: CascadePlan, site: Site, demand: Demand) -> tuple[Site, Demand]:
    """What the plan is for: the site and the demand of the tiers that were chosen; where none were, both as they are."""
    if plan.choice is None:
        return site, demand
    tiers = [site.tiers.index(tier.name) for tier in plan.tiers]
    return site.only(tiers), demand.only(tiers)


def _with_chosen_tiers(
    site: Site, demand: Demand, options: Options, runs: Sequence[Demand], on_evaluation: Callable[[int], None]
) -> CascadePlan:
    """The best plan over the cascades of the candidates."""
    everything = dataclasses.replace(site, grading=None)
    alone, unfit = deployer_for(
        everything, demand, gpus=options.gpus, dispatch=options.dispatch, percentile=options.percentile
    )
    evaluations = 0

    def progress(total: int) -> None:
        nonlocal evaluations
        evaluations = total
        on_evaluation(total)

    def plan(tiers: Tiers, within: Options) -> CascadePlan:
        before = evaluations
        return plan_cascade(
            site.only(tiers),
            demand.only(tiers),
            within,
            runs=[run.only(tiers) for run in runs],
            on_evaluation=lambda n: progress(before + n),
        )

    def reaches(tiers: Tiers, within: Options, rate_per_s: float) -> bool:
        assert demand.rate_per_s is not None
        factor, before = rate_per_s / demand.rate_per_s, evaluations
        planner = _Planner(site.only(tiers), within, lambda n: progress(before + n))
        try:
            planner.checked_plan(demand.only(tiers).scaled(factor), [run.only(tiers).scaled(factor) for run in runs])
        except Unreachable:
            return False
        return True

    return best_cascade(site, demand, options, alone, unfit, plan, reaches, repeated=bool(runs))


def _with_burst_ladder(plan: CascadePlan, demand: Demand, options: Options, floor: float) -> CascadePlan:
    """The plan with its burst ladder, or with why it has none.

    Raises:
        InvalidRequest: The quality that the mean is to hold is over the plan's own, or is not the mean of the judge's scores,
            which routers hold.
    """
    if demand.judged.known_quality is not None:
        raise invalid(
            "burst_floor", "routers hold a mean of judge scores; these prompts have a quality apart from the score"
        )
    held = options.held_quality
    assert held is not None
    if held > plan.quality:
        raise invalid("burst_mean", f"must be at most the plan's own quality, {plan.quality:.2f}, not {held:g}")
    ladder = burst_ladder(
        demand.under(plan.rules),
        plan.thresholds,
        [tier.strategy for tier in plan.tiers],
        plan.dispatch,
        floor=floor,
        mean_quality=held,
        max_utilisation=options.max_utilisation,
    )
    if isinstance(ladder, NoLadder):
        return dataclasses.replace(plan, burst_reason=ladder.reason)
    return dataclasses.replace(plan, burst=ladder)


def _rate_binds(site: Site, demand: Demand, options: Options, runs: Sequence[Demand]) -> Unreachable | None:
    """What to say where the targets can be met, but not by a plan that sustains the rate; None where that is not so."""
    if options.max_utilisation is None or demand.rate_per_s is None:
        return None
    try:
        unbounded = _Planner(site, dataclasses.replace(options, max_utilisation=None), lambda _: None)
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


class _Planner:
    """One command: what the plans that it leads to have in common."""

    def __init__(self, site: Site, options: Options, on_evaluation: Callable[[int], None]) -> None:
        self.site, self.options, self._on_evaluation = site, options, on_evaluation
        self._evaluations = 0
        self.begin: list[tuple[float, ...]] = []  # thresholds of plans for lower rates

    def checked_plan(self, demand: Demand, runs: Sequence[Demand]) -> CascadePlan:
        """A plan whose latency target holds for the mean of `runs` too: the limit it is planned for is lowered until it
        does."""
        options = self.options
        deployer, reasons = self.deployer(demand, options)
        limit_s, least_s = options.max_latency_s, math.inf
        for _ in range(TIGHTENED):
            try:
                plan = self._plan(demand, deployer, reasons, dataclasses.replace(options, max_latency_s=limit_s))
            except Unreachable:
                if limit_s == options.max_latency_s:
                    raise
                break  # what the other stretches need is out of reach
            plan = with_runs(self.site, plan, runs)
            interval = plan.felt_interval
            if limit_s is None or options.max_latency_s is None or interval is None:
                return plan
            if interval.mean <= options.max_latency_s:
                return plan
            least_s = min(least_s, interval.mean)
            limit_s *= MARGIN * options.max_latency_s / interval.mean
        raise Unreachable(
            f"max latency binds: no plan was found whose {options.latency_words} is {options.max_latency_s:g} s on "
            f"{len(runs)} other stretches of the trace: the least was {rounded_up(least_s)} s",
            least_s,
            Binds.MAX_LATENCY,
        )

    def deployer(self, demand: Demand, options: Options) -> tuple[Deployer, dict[str, str]]:
        before = self._evaluations

        def progress(evaluations: int) -> None:
            self._evaluations = before + evaluations
            self._on_evaluation(self._evaluations)

        return deployer_for(
            self.site,
            demand,
            gpus=options.gpus,
            dispatch=options.dispatch,
            objective=options.objective,
            percentile=options.percentile,
            max_utilisation=options.max_utilisation,
            on_evaluation=progress,
        )

    def _plan(self, demand: Demand, deployer: Deployer, reasons: dict[str, str], options: Options) -> CascadePlan:
        try:
            promise, solution = self._solve(demand, deployer, options)
        except Unreachable as error:
            if reasons:
                raise Unreachable(f"{error} ({'; '.join(reasons.values())})", error.best, error.binds) from None
            raise
        if options.budget is Budget.EXACT:
            solution = sustaining(deployer, lambda: _spread(deployer, solution))
        plan = outcome(self.site, demand, solution, deployer, reasons, promise)
        return dataclasses.replace(plan, budget=options.budget, goal=self.options.aim)

    def _solve(self, demand: Demand, deployer: Deployer, options: Options) -> tuple[Promise | None, Solution]:
        """The solution for the largest tier; from there, where that is meant, the one for what users feel."""
        judged, limit_s, aim = demand.judged, options.max_latency_s, options.aim
        min_quality = 0.0 if options.min_quality is None else options.min_quality
        if options.confidence is not None:
            promise = promised(
                judged, min_quality, options.confidence, options.seed, lambda q, on: least_latency(deployer, q, on)
            )
            if limit_s is not None and promise.solution.deployment.latency_s > limit_s:
                raise _latency_binds(promise.solution.deployment.latency_s, options, min_quality, None)
            return promise, promise.solution
        if options.objective is not Objective.LARGEST_TIER:
            return None, self._felt(demand, deployer, options, min_quality)
        if aim is Goal.COST:
            assert limit_s is not None
            return None, cheapest(deployer, min_quality, limit_s, judged)
        if aim is Goal.RATE:
            assert limit_s is not None
            return None, any_within(deployer, min_quality, limit_s, judged, self.begin[::-1])
        if aim is Goal.QUALITY:
            assert limit_s is not None
            solution = most_quality(deployer, limit_s, judged)
            if solution.quality < min_quality:
                least_s = least_latency(deployer, min_quality, judged).deployment.latency_s
                raise _latency_binds(least_s, options, min_quality, solution.quality)
            return None, solution
        solution = least_latency(deployer, min_quality, judged)
        if limit_s is not None and solution.deployment.latency_s > limit_s:
            raise _latency_binds(solution.deployment.latency_s, options, min_quality, None)
        return None, solution

    def _felt(self, demand: Demand, deployer: Deployer, options: Options, min_quality: float) -> Solution:
        def felt_s(thresholds: Sequence[float], strategies: Sequence[Strategy]) -> float:
            run = run_cascade(self.site, demand, thresholds, strategies, options.dispatch)
            return run.latency_s(options.objective, options.percentile)

        if options.aim is Goal.RATE and options.max_latency_s is not None:
            # a tier may be slower than what most users feel: twice the limit leaves room for it
            start = begin_within(deployer, min_quality, 2 * options.max_latency_s, demand.judged, self.begin[::-1])
        else:
            start = begin_of_least_latency(deployer, min_quality, demand.judged, STARTED_FROM)
        felt = EndToEnd(deployer, demand.judged, self.site.judge_s, felt_s)
        limit_s = options.max_latency_s
        if options.aim is Goal.COST:
            assert limit_s is not None
            return felt.cheapest(min_quality, limit_s, start)
        if options.aim is Goal.QUALITY:
            assert limit_s is not None
            return felt.most_quality(limit_s, min_quality, start)
        solution = felt.least_latency(min_quality, start)
        if limit_s is not None:
            seconds = felt_s(solution.thresholds, solution.deployment.strategies)
            if seconds > limit_s:
                raise _latency_binds(seconds, options, min_quality, None)
        return solution


def _spread(deployer: Deployer, solution: Solution) -> Solution:
    """The solution on all GPUs; as it is where it cannot be spread."""
    whole = deployer.spread(solution.thresholds)
    return solution if whole is None else dataclasses.replace(solution, deployment=whole)


def _latency_binds(least_s: float, options: Options, min_quality: float, quality: float | None) -> Unreachable:
    limit_s = options.max_latency_s
    within = "" if quality is None else f"; within {limit_s:g} s the most quality is {rounded_down(quality)}"
    return Unreachable(
        f"max latency binds: at quality {min_quality:g} the least {options.latency_words} is {rounded_up(least_s)} s, "
        f"not {limit_s:g} s{within}",
        least_s,
        Binds.MAX_LATENCY,
    )


def _most_rate(planner: _Planner, demand: Demand, runs: Sequence[Demand]) -> CascadePlan:
    """The highest rate with a plan that meets both targets: from a rate that works, plans for more and more.

    The rate grows by half as long as a plan meets the targets, then halves the way to the least rate at which none was found.
    """
    if demand.rate_per_s is None:
        raise invalid("rate", "the arrivals come all at once: they have no rate that could be changed")
    best: CascadePlan | None = None
    works, fails, factor = 0.0, math.inf, 1.0
    failure: Unreachable | None = None
    for _ in range(2 * RATE_STEPS):
        try:
            best = planner.checked_plan(demand.scaled(factor), [run.scaled(factor) for run in runs])
            planner.begin.append(best.thresholds)
            works = factor
        except Unreachable as error:
            failure, fails = error, factor
        if fails < math.inf and works > 0 and fails / works < 1 + RATE_PRECISION:
            break
        factor = works * 1.5 if fails == math.inf else fails / 2 if works == 0 else math.sqrt(works * fails)
    if best is None:
        assert failure is not None
        raise failure
    return best
