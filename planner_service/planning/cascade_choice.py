"""The form of a plan: which of the candidate models, in their order, as a cascade or with routing before generation. No I/O.

Sets: candidates, in the order of escalation; forms S, the subsets of so many of them as a cascade, and where scores are
predicted, those of two and more with each prompt sent to one of them. Variable: S. Objective and constraints: those of the
goal, for the best plan of S alone. So each form is planned as if it had been stated, and the best of these plans is taken;
of equal ones that with fewer tiers.

Cascades with the best bounds are planned first, and those are left out that cannot matter:
(1) no routing over the tiers reaches the quality; (2) it is too slow with each request alone on the fastest replica; (3) by
these bounds it cannot be one of the two best, of which the second is reported; (4) for the goal rate, no plan is found at the
rate of the second best; (5) the time for the search is over, and there is a plan: the gap counts their bounds.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.planner_service.planning.cascade_plan import CascadePlan, LeftOut
from penstock.planner_service.question.planning_options import Goal, Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.end_to_end import least_felt_s
from penstock.planner_service.routing.goals import rounded_down
from penstock.planner_service.routing.grid import ENUMERATE_UP_TO, EPSILON, Grid, Point, lowest
from penstock.planner_service.routing.solution import Binds, Proof, Solution, Unreachable, too_poor
from penstock.services.acceptance.pipeline import asked_of_plans
from penstock.services.domain.hardware import ReplicaShape
from penstock.types.planned import CascadeChoice, Cost, RunnerUp
from penstock.types.planning import Objective

Tiers = tuple[int, ...]


class Form(NamedTuple):
    """tiers: by number, ascending. routed: each prompt goes to one of them, by predicted scores; else they are a cascade."""

    tiers: Tiers
    routed: bool = False

    @property
    def order(self) -> tuple[int, bool, Tiers]:
        """By which equal forms are tried and taken."""
        return len(self.tiers), self.routed, self.tiers

    def of(self, site: Site, demand: Demand) -> tuple[Site, Demand]:
        """The site and the demand of these tiers. Where prompts are routed, nothing is judged."""
        if not self.routed:
            return site.only(self.tiers), demand.only(self.tiers)
        return dataclasses.replace(site, grading=None).only(self.tiers), demand.only(self.tiers).routed()


PlanOf = Callable[[Form, Options], CascadePlan]
Reaches = Callable[[Form, Options, float], bool]
DeployerOf = Callable[[Form, Options], Deployer]
COSTS_BOUNDED = 500  # routings of a form, each of which is asked for what no deployment of it costs less than


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What no plan of a cascade can do better than.

    quality: the most. reached: the most that is known to be reached. latency_s: the least, of the objective's latency.
    cost: the least, as CascadePlan.cost: of what sustains the rate. few_routings: all of them are tried.
    """

    quality: float
    reached: float
    latency_s: float
    cost: float
    few_routings: bool

    def value(self, goal: Goal) -> float:
        """What CascadePlan.rank begins with, at least."""
        match goal:
            case Goal.COST:
                return self.cost
            case Goal.QUALITY:
                return -self.quality
            case Goal.RATE:
                return -math.inf
        return self.latency_s


def cascades_of(candidates: int, options: Options) -> list[Tiers]:
    """All cascades of the sizes that are asked for, the smallest first, each in the order of the candidates."""
    least, most = _sizes(options)
    return [tiers for size in range(least, most + 1) for tiers in itertools.combinations(range(candidates), size)]


def forms_of(candidates: int, options: Options, *, predicted: bool) -> list[Form]:
    """All forms of the sizes that are asked for. predicted: whether prompts have predicted scores."""
    cascades = cascades_of(candidates, options)
    routed = cascades if predicted and not options.has_rules else []
    return [*map(Form, cascades), *(Form(tiers, routed=True) for tiers in routed if len(tiers) > 1)]


def _sizes(options: Options) -> tuple[int, int]:
    assert options.max_tiers is not None
    return options.min_tiers or 1, options.max_tiers


@dataclass
class FormChoice:
    """The choice between all forms of the candidates.

    site, demand: of all candidates. alone: their deployer without grading and without a bound on utilisation, for the bounds.
    unfit: candidates that fit nowhere, with the reason. plan(form, options): the best plan of a form; raises Unreachable.
    reaches(form, options, rate): whether a plan is found at so many requests per second. deployer(form, options): with the
    bound on utilisation. repeated: whether a latency target has to hold on other stretches, too. is_over: whether
    the time for the search is.
    """

    site: Site
    demand: Demand
    options: Options
    alone: Deployer
    unfit: dict[str, str]
    plan: PlanOf
    reaches: Reaches
    deployer: DeployerOf
    repeated: bool
    is_over: Callable[[], bool]

    def __post_init__(self) -> None:
        self.all = forms_of(len(self.site.tiers), self.options, predicted=self.demand.judged.predicted is not None)
        self.left_out: dict[Form, LeftOut] = {}
        self.bounds: dict[Form, _Bounds] = {}
        self.plans: dict[Form, CascadePlan] = {}
        self.failures: dict[Form, Unreachable] = {}
        self.within = dataclasses.replace(self.options, max_tiers=None, min_tiers=None)
        for form in self.all:
            if self._can_run(form):
                self._bound(form)

    def best(self) -> CascadePlan:
        """The best plan, with how it was chosen.

        Raises:
            Unreachable: No cascade has a plan; it says which target binds for the one that comes nearest.
        """
        aim = self.options.aim
        open_forms = [form for form in self.all if form not in self.left_out]
        for form in sorted(open_forms, key=lambda one: (self.bounds[one].value(aim), *one.order)):
            enough = self._enough()
            if self.bounds[form].value(aim) > enough + EPSILON or self._slower(form, enough):
                self.left_out[form] = LeftOut.BOUND
            elif self.plans and self.is_over():
                self.left_out[form] = LeftOut.SEARCH_TIME
            else:
                self._try(form)
        if not self.plans:
            self._try_slow()
        if not self.plans:
            raise self._unreachable()
        ranked = self._ranked()
        chosen = self.plans[ranked[0]]
        other = None if len(ranked) == 1 else self.plans[ranked[1]]
        return dataclasses.replace(
            chosen,
            solution=self._solution(chosen),
            simulations=sum(plan.simulations for plan in self.plans.values()),
            infeasible={**chosen.infeasible, **self.unfit},
            choice=CascadeChoice(
                self.site.tiers,
                *_sizes(self.options),
                len(self.all),
                len(self.plans),
                dict(Counter(self.left_out[form] for form in self.all if form in self.left_out)),
                None if other is None else _runner_up(other),
            ),
        )

    def _can_run(self, form: Form) -> bool:
        grading, is_judged = self.site.grading, len(form.tiers) > 1 and not form.routed
        if any(self.site.tiers[tier] in self.unfit for tier in form.tiers):
            self.left_out[form] = LeftOut.GPUS
        elif grading is not None and grading.by_tier and grading.tier not in form.tiers and is_judged:
            self.left_out[form] = LeftOut.JUDGE
        return form not in self.left_out

    def _bound(self, form: Form) -> None:
        """Compute the bounds of a form, and leave it out where they show that it misses a target.

        Under a skip rule or one for long answers requests visit fewer tiers, and best answers have another quality: the
        bounds hold for none of these.
        """
        options, tiers = self.options, form.tiers
        demand = form.of(self.site, self.demand)[1]
        judged = demand.judged
        least_cost = min(self._least_cost(tier) for tier in tiers)
        target = -1.0 if options.min_quality is None else options.min_quality
        if options.has_rules:
            most = float(judged.quality.max(axis=1).mean())
            reached = max(float(judged.quality.mean(axis=0).max()), judged.under(asked_of_plans(options.rules)).most)
            self.bounds[form] = _Bounds(most, reached, 0.0, least_cost, False)
            if most < target - EPSILON:
                self.left_out[form] = LeftOut.MIN_QUALITY
            return
        grid = Grid(judged)
        most = float(grid.qualities.max())
        few = grid.qualities.size <= ENUMERATE_UP_TO
        points, quality = grid.at_least(target), most
        if not points:
            self.bounds[form] = _Bounds(most, most, 0.0, least_cost, few)
            self.left_out[form] = LeftOut.MIN_QUALITY
            return
        requests, alone_s = demand.requests, self.alone.alone_s(tiers)
        limit_s = math.inf if options.max_latency_s is None else options.max_latency_s
        if options.objective is not Objective.LARGEST_TIER:
            how = (self.site.judge_s, options.percentile, options.objective)
            fastest = least_felt_s(grid, points, requests, alone_s, *how) or 0.0
        else:
            bounds = grid.latency_bounds(requests, alone_s, options.percentile)
            fastest = min(float(bounds[point]) for point in points)
            quality = max((float(grid.qualities[p]) for p in points if bounds[p] <= limit_s + EPSILON), default=most)
        if options.aim is Goal.COST:
            least_cost = max(least_cost, self._cost_at_least(form, grid, points))
        self.bounds[form] = _Bounds(quality, most, fastest, least_cost, few)
        if fastest > limit_s + EPSILON:
            self.left_out[form] = LeftOut.MAX_LATENCY

    def _least_cost(self, tier: int) -> float:
        """Of a tier that serves at all, in the unit of CascadePlan.cost."""
        if self.site.remote_of(tier) is not None:
            return 0.0

        def cost(shape: ReplicaShape) -> float:
            dollars = self.site.dollars_per_hour([(shape, 1)])
            return float(shape.gpus) if dollars is None else dollars

        return min(cost(kind.shape) for kind in self.alone.kinds[tier])

    def _cost_at_least(self, form: Form, grid: Grid, points: Sequence[Point]) -> float:
        """What no plan of these routings that sustains the rate costs less than, in the unit of CascadePlan.cost.

        Of a cascade the lowest routings take the least work. Where each request goes to one tier alone, any of them may:
        nothing is known (0) where these are too many.
        """
        routings = points if form.routed else [each for group in grid.groups(points) for each in lowest(group)]
        if len(routings) > COSTS_BOUNDED:
            return 0.0
        deployer = self.deployer(form, self.within)
        least = min(deployer.cost_at_least(grid.thresholds(point)) for point in routings)
        is_priced = self.site.more or self.site.remotes  # as the deployer counts then; else it counts GPUs
        return least if is_priced else least * (self.site.types[0].dollars_per_gpu_hour or 1.0)

    def _enough(self) -> float:
        """The value that a plan of another cascade needs to be one of the two best."""
        ranked = self._ranked()
        return math.inf if len(ranked) < 2 else self.plans[ranked[1]].rank(self.options.aim)[0]

    def _slower(self, form: Form, enough: float) -> bool:
        """Whether the rate is what is to be best, and a form has no plan at that of the second best."""
        if self.options.aim is not Goal.RATE or self.options.has_rules or enough == math.inf:
            return False
        return not self.reaches(form, self.within, -enough)

    def _try(self, form: Form) -> None:
        try:
            self.plans[form] = self.plan(form, self.within)
            self.left_out.pop(form, None)
        except Unreachable as error:
            self.failures[form], self.left_out[form] = error, LeftOut.NO_PLAN

    def _try_slow(self) -> None:
        """Plan those that are too slow by their bounds: their errors say what latency can be had."""
        slow = [form for form, why in self.left_out.items() if why is LeftOut.MAX_LATENCY]
        for form in sorted(slow, key=lambda one: (self.bounds[one].latency_s, one.order)):
            known = (e.best for e in self.failures.values() if e.binds is Binds.MAX_LATENCY)
            if self.bounds[form].latency_s < min(known, default=math.inf):
                self._try(form)

    def _ranked(self) -> list[Form]:
        """Forms with a plan, the best first; of those that serve in the same way, the best one alone."""

        def key(form: Form) -> tuple[tuple[float, float], tuple[int, bool, Tiers]]:
            return self.plans[form].rank(self.options.aim), form.order

        serving: dict[tuple[bool, tuple[str, ...]], Form] = {}
        for form in sorted(self.plans, key=key):
            serving.setdefault(_serving(self.plans[form]), form)
        return list(serving.values())

    def _solution(self, chosen: CascadePlan) -> Solution:
        """What is proved of the chosen plan, over all forms: the gap is to the best of what each of them may have."""
        own, aim = chosen.solution, self.options.aim
        best, least = chosen.rank(aim)[0], math.inf
        for form in self.all:
            why = self.left_out.get(form)
            if why in (LeftOut.BOUND, LeftOut.SEARCH_TIME):
                least = min(least, self.bounds[form].value(aim))
            elif why is LeftOut.NO_PLAN and not self._is_proved(form):
                least = min(least, self.bounds[form].cost if aim is Goal.COST else -math.inf)
            elif why is None:
                known = _least(self.plans[form], aim)
                least = min(least, max(known, self.bounds[form].cost) if aim is Goal.COST else known)
        evaluations = sum(plan.solution.evaluations for plan in self.plans.values())
        if least == -math.inf or self.options.has_rules:  # nothing is proved over rules
            return dataclasses.replace(own, proof=Proof.SEARCHED, gap=None, evaluations=evaluations)
        ahead = best - least
        gap = max(0.0, ahead if aim is Goal.QUALITY else ahead / best if best > 0 else 0.0)
        gap = gap if gap > EPSILON else 0.0
        proofs = {plan.solution.proof for plan in self.plans.values()}
        every = not {LeftOut.BOUND, LeftOut.SEARCH_TIME, LeftOut.MAX_LATENCY} & set(self.left_out.values())
        if own.proof is Proof.SEARCHED or own.gap is None or gap > own.gap + EPSILON:
            proof = Proof.SEARCHED
        else:
            proof = Proof.ENUMERATED if every and proofs == {Proof.ENUMERATED} else Proof.BOUNDED
        return dataclasses.replace(own, proof=proof, gap=gap, evaluations=evaluations)

    def _is_proved(self, form: Form) -> bool:
        """Whether a form for which no plan was found has none: all of its routings were tried, or none has the quality."""
        options = self.options
        if options.has_rules:
            return False
        if self.failures[form].binds is Binds.MIN_QUALITY:
            return True
        lowered = self.repeated and options.max_latency_s is not None  # the limit: what fails then is not proved
        return self.bounds[form].few_routings and options.objective is Objective.LARGEST_TIER and not lowered

    def _unreachable(self) -> Unreachable:
        """What binds for the form that comes nearest to the targets."""
        if self.failures and any(error.binds is not Binds.MIN_QUALITY for error in self.failures.values()):
            form, error = min(self.failures.items(), key=lambda one: (*one[1].distance, *one[0].order))
            of = f"the nearest of {len(self.all)} cascades is {self._words(form)}"
            return Unreachable(f"{error} ({of})", error.best, error.binds)
        if not self.bounds:
            why = "; ".join(self.unfit.values())
            return Unreachable(f"no cascade of the candidates fits the GPUs{f' ({why})' if why else ''}", math.inf)
        form = max(self.bounds, key=lambda one: (self.bounds[one].reached, -len(one.tiers)))
        if (known := self.failures.get(form)) is not None:
            of = f"{self._words(form)}, the best of {len(self.all)} cascades"
            return Unreachable(f"{known} ({of})", known.best, known.binds)
        best, unfit = self.bounds[form].reached, "; ".join(self.unfit.values())
        why = f"no cascade of the candidates reaches quality {self.options.min_quality:g}"
        return too_poor(
            f"{why}: the best, {self._words(form)}, has {rounded_down(best)}{f' ({unfit})' if unfit else ''}", best
        )

    def _words(self, form: Form) -> str:
        return form_words([self.site.tiers[tier] for tier in form.tiers], routed=form.routed)


def form_words(tiers: Sequence[str], *, routed: bool) -> str:
    """`small + large`, or `small or large by a predictor`."""
    return f"{' or '.join(tiers)} by a predictor" if routed else " + ".join(tiers)


def _serving(plan: CascadePlan) -> tuple[bool, tuple[str, ...]]:
    """(whether prompts are routed, the tiers of a plan that serve anything)."""
    return plan.is_routed, tuple(tier.name for tier in plan.tiers if tier.strategy.used)


def _least(plan: CascadePlan, goal: Goal) -> float:
    """What CascadePlan.rank begins with, for the best plan of the same cascade, at least."""
    value, gap = plan.rank(goal)[0], plan.solution.gap
    if gap is None:
        return -math.inf
    return value - gap if goal is Goal.QUALITY else value * (1 - gap)


def chosen_instead(first: CascadePlan, plan: CascadePlan) -> CascadeChoice | None:
    """How a plan was chosen that is at least as good as the first, the best of all forms: if it serves in another way, the
    first is the runner-up."""
    if first.choice is None or _serving(first) == _serving(plan):
        return first.choice
    return dataclasses.replace(first.choice, runner_up=_runner_up(first))


def _runner_up(plan: CascadePlan) -> RunnerUp:
    names = tuple(tier.name for tier in plan.tiers)
    cost = Cost(plan.gpus, plan.dollars_per_hour)
    return RunnerUp(names, plan.quality, plan.felt_s, cost, plan.rate_per_s, plan.is_routed)
