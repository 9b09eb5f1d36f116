"""A plan as it is told: tiers, latencies, load and cost, simulated from end to end. No I/O."""

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.question.planning_options import Goal
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import CascadeRun, run_cascade
from penstock.planner_service.replay.repeated_runs import repeated
from penstock.planner_service.replay.sustained_load import SustainedLoad, sustained_load
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.quality import route
from penstock.planner_service.routing.solution import Solution
from penstock.planner_service.simulator import Dispatch, percentiles
from penstock.services.acceptance.pipeline import NO_RULES
from penstock.services.acceptance.threshold import SKIPPED, accepts_all
from penstock.types.planned import CascadeChoice, Interval, Judging, LargestAlone, QualityPromise
from penstock.types.planning import Objective
from penstock.types.rules import AcceptanceRules, SkipFor
from penstock.types.simulated import SimulatedTier, UserLatency


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """One tier of a plan. gpus: given to it. strategy: with the latency it was chosen for. p95_s: of its own requests' whole
    latencies, by itself.

    report: its requests as the cascade runs.
    """

    name: str
    model: str
    gpus: int
    strategy: Strategy
    share_processed: float
    share_answered: float
    report: SimulatedTier
    p95_s: float


class LeftOut(enum.StrEnum):
    """Why no plan was made for a cascade of the candidates, or none was found.

    GPUS: a model fits nowhere. JUDGE: it lacks the tier that grades. MIN_QUALITY: no routing reaches it. MAX_LATENCY: slower
    even with each request alone. BOUND: no plan of it can be as good as the two best. SEARCH_TIME: the search was over.
    NO_PLAN: none meets the targets.
    """

    GPUS = "gpus"
    JUDGE = "judge"
    MIN_QUALITY = "min_quality"
    MAX_LATENCY = "max_latency_s"
    BOUND = "bound"
    SEARCH_TIME = "search_s"
    NO_PLAN = "no_plan"


def felt_in(run: CascadeRun) -> UserLatency:
    """What users of a simulated cascade feel, in seconds; see Objective."""
    kinds = (Objective.END_TO_END, Objective.FIRST_TOKEN, Objective.PACE)
    return UserLatency(*(percentiles(run.felt_s(kind)) for kind in kinds))


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """latency_p95_s: the largest tier's (the paper's L). felt: what users feel, over the tiers visited and judging, each
    tier's requests arriving when the tier below has given them up. felt_s: the latency that the objective means, at its
    percentile. load: None where arrivals have no rate.

    latency_interval, end_to_end_interval: both p95 on other stretches of the trace with other prompts; felt_interval: of
    felt_s; None where none were given. seconds: that the arrivals last, runs_s: those of the shortest other stretch.
    rate_per_s: at which they come, for the goal rate the one that was found.
    rules: what its routing has in addition to thresholds.
    gpu_s: see Deployer.gpu_s. grading: how much is judged, and how long that takes; None where judging loads nothing. choice:
    how the tiers were chosen from candidates; None where they were given. cached_share: of all prompt tokens, those that are
    cached and not computed.
    largest_alone: of a cheapest plan without a latency target, what it keeps to.
    """

    tiers: tuple[TierOutcome, ...]
    thresholds: tuple[float, ...]
    quality: float
    latency_p95_s: float
    felt: UserLatency
    felt_s: float
    solution: Solution
    dispatch: Dispatch
    binds: str
    simulations: int
    gpu_step: int
    gpu_s: float
    infeasible: dict[str, str] = field(default_factory=dict)
    promise: QualityPromise | None = None
    objective: Objective = Objective.LARGEST_TIER
    percentile: float = 95.0
    load: SustainedLoad | None = None
    goal: Goal = Goal.LATENCY
    latency_interval: Interval | None = None
    end_to_end_interval: Interval | None = None
    felt_interval: Interval | None = None
    requests: int = 0
    seconds: float = 0.0
    runs_s: float = 0.0
    rate_per_s: float | None = None
    dollars_per_hour: float | None = None
    rules: AcceptanceRules = NO_RULES
    grading: Judging | None = None
    choice: CascadeChoice | None = None
    cached_share: float = 0.0
    largest_alone: LargestAlone | None = None

    @property
    def gpus(self) -> int:
        return sum(tier.gpus for tier in self.tiers)

    @property
    def cost(self) -> float:
        """What the goal cost makes least: dollars per hour where GPUs have prices, else GPUs."""
        return float(self.gpus) if self.dollars_per_hour is None else self.dollars_per_hour

    def rank(self, goal: Goal) -> tuple[float, float]:
        """(what the goal makes least, what decides between equals): the better of two plans has the lower rank."""
        match goal:
            case Goal.COST:
                return self.cost, self.gpu_s
            case Goal.QUALITY:
                return -self.quality, self.felt_s
            case Goal.RATE:
                return -(self.rate_per_s or 0.0), self.felt_s
        return self.felt_s, self.gpus

    @property
    def is_routed(self) -> bool:
        """Whether each prompt goes to one of several tiers, by its predicted scores, and nothing is judged."""
        limits = [limit for limit in self.thresholds if limit <= 100]
        return bool(limits) and all(map(accepts_all, limits)) and sum(tier.strategy.used for tier in self.tiers) > 1

    @property
    def as_routed(self) -> Self:
        """A plan for prompts that are routed, whose thresholds are limits of `lead`, as it is served."""
        served = tuple(SKIPPED if limit > 100 else 0.0 for limit in self.thresholds)
        best = self.tiers[-1].name
        limits = tuple(SkipFor(best, round(100 - h, 6)) if 0 < h <= 100 else None for h in self.thresholds)
        solution = dataclasses.replace(self.solution, thresholds=served)
        rules = AcceptanceRules(skip_for=limits) if any(limits) else NO_RULES
        return dataclasses.replace(self, thresholds=served, solution=solution, rules=rules)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """By tier, the rate offered to it over what it sustains; 0 where arrivals have no rate."""
        return (0.0,) * len(self.tiers) if self.load is None else self.load.utilisation

    @property
    def end_to_end_p95_s(self) -> float:
        return self.felt.end_to_end.p95

    @property
    def stay_s(self) -> float:
        """How long requests stay, by which a stretch of the trace is short or long: p95 of the slowest tier, if that is the
        objective, else end to end; of the longer stretches, where there are some."""
        if self.objective is Objective.LARGEST_TIER:
            return self.latency_p95_s if self.latency_interval is None else self.latency_interval.mean
        return self.end_to_end_p95_s if self.end_to_end_interval is None else self.end_to_end_interval.mean


def outcome(site: Site, demand: Demand, solution: Solution, deployer: Deployer, reasons: dict[str, str]) -> CascadePlan:
    """The plan that a solution amounts to, simulated from end to end. A tier from which nothing escalates accepts all."""
    strategies = solution.deployment.strategies
    thresholds = _served(_lowered(demand, solution.thresholds), strategies)
    solution = dataclasses.replace(solution, thresholds=thresholds)
    run = run_cascade(site, demand, thresholds, strategies, deployer.dispatch)
    processed, p95_s = route(demand.judged, thresholds), deployer.tier_latencies_s(thresholds, strategies, 95.0)
    names, shares = (model.name for model in site.models), (processed.share_processed(), processed.share_answered())
    columns = (site.tiers, names, solution.deployment.gpus, strategies, *shares, run.reports, p95_s)
    tiers = tuple(TierOutcome(*row) for row in zip(*columns, strict=True))
    slowest = max(tiers, key=lambda tier: tier.p95_s)
    largest = deployer.objective is Objective.LARGEST_TIER
    used = sum(s.gpus for s in strategies)
    reached = route(demand.requests, thresholds).processed
    load = sustained_load(demand.requests, demand.arrival_s, reached, strategies, deployer.dispatch, site.grading)
    binds = f"{slowest.name} is the slowest tier; {used} of {deployer.gpus} GPUs are used"
    return CascadePlan(
        tiers,
        thresholds,
        processed.quality,
        slowest.p95_s,
        felt_in(run),
        solution.deployment.latency_s if largest else run.latency_s(deployer.objective, deployer.percentile),
        solution,
        deployer.dispatch,
        binds if load is None else f"{binds}; {load}",
        deployer.simulations,
        deployer.gpu_step,
        deployer.gpu_s(thresholds),
        reasons,
        objective=deployer.objective,
        percentile=deployer.percentile,
        load=load,
        requests=len(demand.arrival_s),
        seconds=demand.seconds,
        rate_per_s=demand.rate_per_s,
        dollars_per_hour=dollars_per_hour(site, strategies),
        grading=run.grading,
        cached_share=demand.cached_share,
    )


def _served(thresholds: Sequence[float], strategies: Sequence[Strategy]) -> tuple[float, ...]:
    """Thresholds under which nothing reaches a tier without replicas: one that no request of this stretch reaches, but one of
    another may."""
    used = [strategy.used for strategy in strategies]
    last = max((tier for tier, is_used in enumerate(used) if is_used), default=len(used) - 1)
    return tuple(0.0 if tier == last else limit if used[tier] else SKIPPED for tier, limit in enumerate(thresholds))


def _lowered(demand: Demand, thresholds: Sequence[float]) -> tuple[float, ...]:
    """The thresholds, 0 for tiers from which neither judged prompts nor requests escalate: these are simulated as not
    judged."""
    if demand.judged.routed:
        return tuple(thresholds)
    both = (one.rejecting(route(one, thresholds).processed) for one in (demand.judged, demand.requests))
    rejecting = np.logical_or(*both)
    return tuple(h if h > 100 or rejecting[tier] else 0.0 for tier, h in enumerate(thresholds))


def dollars_per_hour(site: Site, strategies: Sequence[Strategy]) -> float | None:
    """What GPUs and tokens of remote tiers cost; None where a type of GPU that is used has no price."""
    gpus = site.dollars_per_hour((replica.shape, count) for s in strategies for replica, count in s.replicas)
    return None if gpus is None else gpus + sum(s.remote_dollars_per_hour for s in strategies)


def with_runs(site: Site, plan: CascadePlan, runs: Sequence[Demand]) -> CascadePlan:
    """The plan with what it reaches on other stretches of the workload."""
    if not runs:
        return plan
    strategies = [tier.strategy for tier in plan.tiers]
    which = (Objective.LARGEST_TIER, 95.0), (Objective.END_TO_END, 95.0), (plan.objective, plan.percentile)
    largest, whole, felt = repeated(site, runs, plan.thresholds, strategies, plan.dispatch, which)
    lasted = min(run.seconds for run in runs)
    return dataclasses.replace(
        plan, latency_interval=largest, end_to_end_interval=whole, felt_interval=felt, runs_s=lasted
    )
