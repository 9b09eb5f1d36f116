"""Plans for questions."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.planner_service.api.slos import attainments
from penstock.planner_service.files.measured import workload_of
from penstock.planner_service.files.quality import judged_for
from penstock.planner_service.files.site import site_of
from penstock.planner_service.manifests.node_layout import NodeLayout, node_layout
from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.planning.frontiers import Points, frontiers
from penstock.planner_service.planning.horizon import plan_over_horizon
from penstock.planner_service.planning.latency_band import latency_band, over_band
from penstock.planner_service.planning.plan_cascade import chosen_of, plan_cascade
from penstock.planner_service.planning.plan_report import plan_report
from penstock.planner_service.planning.sweep import Axis, SweepPoint, check_sweep, sweep_values
from penstock.planner_service.planning.verdict import next_step
from penstock.planner_service.question.exclusions import SWEEP, names_of_files
from penstock.planner_service.question.planning_options import Goal, Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.slo_classes import WorkloadClass
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.routing.solution import Unreachable, best_of
from penstock.planner_service.simulator import Workload
from penstock.services.acceptance.pipeline import NO_RULES, asked_of_plans
from penstock.types import planned as types
from penstock.types.planning import PlanningQuestion
from penstock.types.rules import AcceptanceRules

FRONTIER_POINTS, TYPED_FRONTIER_POINTS = 16, 8  # with one type of GPU, with several

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what it is for.

    site, demand: of the tiers that were chosen; the demand is what routing without the plan's rules gets. candidates,
    offered: the same of all tiers. options: that were asked for. band: where step times are estimated.
    """

    plan: CascadePlan
    site: Site
    demand: Demand
    candidates: Site
    offered: Demand
    options: Options
    took_s: float
    band: types.LatencyBand | None = None

    def report(self, step: types.NextStep | None = None) -> types.CascadePlan:
        """The plan as it is reported. step: where it was computed."""
        return plan_report(self.plan, self.site, self.demand, self.options, self.took_s, step, self.band)

    def compared(self, classes: Sequence[WorkloadClass] = ()) -> types.CascadePlan:
        """The report with what more quality takes, where there was time for that.

        classes: of requests, whose SLO attainment is reported.
        """
        ended = self.took_s > (self.options.search_s or math.inf)
        step = (
            None if ended else next_step(self.plan, self.offered, self.options, partial(plan_cascade, self.candidates))
        )
        strategies = [tier.strategy for tier in self.plan.tiers]
        demand, seed = self.demand.under(self.plan.rules), self.options.seed
        slo = attainments(self.site, demand, self.plan.thresholds, strategies, classes, seed)
        return dataclasses.replace(self.report(step), slo=slo)

    def frontiers(self) -> tuple[Points, Points]:
        """See `planning.frontiers`."""
        points = FRONTIER_POINTS if len(self.site.types) == 1 else TYPED_FRONTIER_POINTS
        options, demand = self.options, self.demand.under(self.plan.rules)
        return frontiers(self.site, demand, self.plan, options.gpus, points, options.most_utilisation)

    def node_layout(self) -> NodeLayout:
        tiers = [[(replica.shape, count) for replica, count in tier.strategy.replicas] for tier in self.plan.tiers]
        return node_layout(self.site.types, tiers)


@dataclass(frozen=True, slots=True)
class Swept:
    """Plans for several values. options: of the question."""

    options: Options
    points: Sequence[SweepPoint]


def plan(question: PlanningQuestion, on_evaluation: Progress = lambda _: None, *, for_slos: bool = False) -> Planned:
    """The best plan for a question. on_evaluation: is told how many routings have been tried.

    for_slos: with replicas that can keep SLOs alone, without pipeline stages and data-parallel attention.

    Raises:
        InvalidRequest: A field of the question is unsound, or does not go with the others; names it.
        Unreachable: No plan meets the targets; says which of them binds.
    """
    site = dataclasses.replace(site_of(question.cluster, question.models), one_batch=for_slos)
    judged, trace = judged_for(question.quality, site), workload_of(question.trace)
    return _with_drafters(site, trace, judged, _options(question, site, trace, judged), on_evaluation)


def _with_drafters(
    site: Site, trace: Workload, judged: JudgedSample, options: Options, on_evaluation: Progress = lambda _: None
) -> Planned:
    """The best plan without drafters, without those of one tier, or with all that are stated.

    Raises:
        InvalidRequest, Unreachable: As `plan`.
    """

    def without(off: Sequence[int]) -> Planned:
        return plan_for(
            site.without_drafters(off), trace, judged, options, on_evaluation=on_evaluation, is_over=is_over
        )

    ends_s = time.monotonic() + (options.search_s or math.inf)

    def is_over() -> bool:
        return time.monotonic() > ends_s

    drafted = tuple(tier for tier in range(len(site.tiers)) if site.speculation_of(tier).drafters)
    offs = dict.fromkeys((drafted, *((tier,) for tier in drafted), ()))  # of equal plans, that with the fewest
    tried = (partial(without, off) for n, off in enumerate(offs) if n == 0 or not is_over())
    return best_of(tried, lambda planned: planned.plan.rank(options.aim))


def _options(question: PlanningQuestion, site: Site, trace: Workload, judged: JudgedSample, *names: str) -> Options:
    """What is asked for. names: of `exclusions`, in addition to those of the question."""
    known = names_of_files(site, judged, at_once=trace.rate_per_s == math.inf)
    return Options.of(question, len(site.tiers), known.union(names))


def plan_for(
    site: Site,
    trace: Workload,
    judged: JudgedSample,
    options: Options,
    *,
    under: AcceptanceRules = NO_RULES,
    on_evaluation: Progress = lambda _: None,
    is_over: Callable[[], bool] = lambda: False,
) -> Planned:
    """The best plan for a stretch of the trace, run on other stretches of it. under: rules that routing has in any case.
    is_over: see plan_cascade.

    Raises:
        InvalidRequest, Unreachable: As `plan`.
    """
    began = time.monotonic()

    def planned(options: Options) -> tuple[CascadePlan, Demand]:
        def plan(demand: Demand, runs: Sequence[Demand]) -> CascadePlan:
            runs = [run.under(under) for run in runs]
            return plan_cascade(
                site, demand.under(under), options, runs=runs, on_evaluation=on_evaluation, is_over=is_over
            )

        result, offered = plan_over_horizon(plan, site, trace, judged, options)
        return result, offered.under(under)

    (result, offered), band = over_band(planned(options), options, planned, partial(latency_band, site))
    took_s = time.monotonic() - began
    if result.largest_alone is not None:
        options = dataclasses.replace(options, goal=Goal.COST, max_latency_s=result.largest_alone.limit_s)
    return Planned(result, *chosen_of(result, site, offered), site, offered, options, took_s, band)


def sweep(
    question: PlanningQuestion, axis: Axis, values: Sequence[float], on_point: Callable[[int, int], None]
) -> Swept:
    """A plan for each value of what is varied, all else as the question has it. values: empty for some around the question's.

    on_point: is told the number of each plan before it is made, from 1, and of how many.

    Raises:
        InvalidRequest: As `plan`; or the values do not go with the question.
    """
    site = site_of(question.cluster, question.models)
    judged, trace = judged_for(question.quality, site), workload_of(question.trace)
    options = _options(question, site, trace, judged, SWEEP, f"{SWEEP}: {axis.value}")
    if not values:
        rate = options.rate or trace.rate_per_s
        delivered = judged.under(asked_of_plans(options.rules))
        values = sweep_values(axis, options, rate, (judged.worst, delivered.most), site.gpus)
    check_sweep(axis, values)
    points = []
    for number, value in enumerate(values, 1):
        on_point(number, len(values))
        changed = axis.of(options, value)
        try:
            points.append(SweepPoint(value, _with_drafters(site, trace, judged, changed).report()))
        except Unreachable as error:
            points.append(SweepPoint(value, None, str(error)))
    return Swept(options, points)
