"""A cascade plan from a cluster, models, arrivals and judged prompts: what `penstock plan` computes. No I/O."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.planner_service.deployment.search import NOTHING
from penstock.planner_service.planning.cascade_choice import Form, FormChoice
from penstock.planner_service.planning.cascade_plan import CascadePlan, outcome, with_runs
from penstock.planner_service.planning.deployers import deployer_for
from penstock.planner_service.planning.largest_alone import largest_alone
from penstock.planner_service.planning.one_plan import TIGHTENED, PlanSearch
from penstock.planner_service.planning.rule_search import RuleSearch
from penstock.planner_service.question.exclusions import names_of_files
from penstock.planner_service.question.planning_options import Goal, Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.routing.confidence import NewPrompts
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.goals import rounded_down
from penstock.planner_service.routing.grid import EPSILON, MOST_TIERS
from penstock.planner_service.routing.quality import SKIPPED, answered_quality
from penstock.planner_service.routing.solution import Binds, Deployment, Unreachable
from penstock.services.acceptance.pipeline import NO_RULES, asked_of_plans
from penstock.services.domain.errors import invalid
from penstock.types.rules import AcceptanceRules

NEARER = 3  # times that the most that can be promised is computed, each from the one before


def plan_cascade(
    site: Site,
    demand: Demand,
    options: Options,
    *,
    runs: Sequence[Demand] = (),
    on_evaluation: Callable[[int], None] = lambda _: None,
    is_over: Callable[[], bool] = lambda: False,
) -> CascadePlan:
    """The best plan for a goal within the targets.

    runs: other stretches of the same workload, on which the plan is run when it is found; a latency target has to hold for
    their mean. A cheapest plan without a latency target keeps to that of `largest_alone`. is_over: whether no further
    form or rule is to be tried, once one is planned.

    Raises:
        InvalidRequest: options that do not go together, one out of bounds, more GPUs than there are, or fewer requests
            than the percentile needs.
        Unreachable: no plan meets the targets, or no tier that is needed fits; it says which target binds.
    """
    options.check(len(site.tiers), names_of_files(site, demand.judged, at_once=demand.rate_per_s is None))
    if len(demand.arrival_s) < options.least_requests:
        least = options.least_requests
        raise invalid("requests", f"must be at least {least} to plan on, not {len(demand.arrival_s)}")
    return _Planner(site, demand, runs, on_evaluation, is_over).plan(options)


@dataclass(frozen=True, slots=True)
class _Planner:
    """Of one question. site, demand, runs: of the stated tiers, or of all candidates."""

    site: Site
    demand: Demand
    runs: Sequence[Demand]
    on_evaluation: Callable[[int], None]
    is_over: Callable[[], bool]

    def plan(self, options: Options) -> CascadePlan:
        """See plan_cascade."""
        if options.aim is Goal.COST and options.max_latency_s is None:
            alone = largest_alone(self.site, self.demand, options, self.runs)
            plan = self.plan(dataclasses.replace(options, goal=Goal.COST, max_latency_s=alone.limit_s))
            return dataclasses.replace(plan, largest_alone=alone)
        if options.confidence is not None:
            return self._with_promise(options, options.confidence)
        if options.max_tiers is not None:
            return self._with_chosen_tiers(options)
        judged, tiers = self.demand.judged, len(self.site.tiers)
        if judged.under_rules or not options.chooses_form(tiers, predicted=judged.predicted is not None):
            return self._of_all_tiers(options)
        if not options.has_rules:
            return self._of_best_form(options)
        try:
            plain = self._of_best_form(options.without_rules)
        except Unreachable:
            plain = None
        return self._rules(options).plan(plain)

    def _with_promise(self, options: Options, confidence: float) -> CascadePlan:
        """The best plan whose quality holds on new prompts, with what it promises.

        It is planned for more quality, and for more still where its replies differ more than those of the routing assumed.
        """
        judged, requested = self.demand.judged.under(asked_of_plans(options.rules)), options.min_quality
        new = NewPrompts(judged, confidence, options.seed)
        needed = None if requested is None else min(100.0, new.needed(requested))
        for _ in range(TIGHTENED):
            try:
                plan = self.plan(dataclasses.replace(options, confidence=None, min_quality=needed))
            except Unreachable as error:
                if error.binds is Binds.MIN_QUALITY and requested is not None and needed is not None:
                    raise _not_promised(new, options, requested, needed, error, len(judged)) from None
                raise
            served = chosen_of(plan, self.site, self.demand)[1].judged.under(plan.rules)
            promise = new.promise(answered_quality(served, plan.thresholds), requested)
            if requested is None or needed is None or promise.least_quality >= requested - EPSILON:
                break
            needed = min(100.0, max(needed, plan.quality) + requested - promise.least_quality)
        return dataclasses.replace(plan, promise=promise)

    def _of_all_tiers(self, options: Options) -> CascadePlan:
        """The best plan in which any of the tiers may answer."""
        if options.has_rules:
            return self._rules(options).plan()
        return PlanSearch(self.site, options, self.on_evaluation).plan(self.demand, self.runs)

    def _rules(self, options: Options) -> RuleSearch:
        return RuleSearch(self.site, self.demand, options, self.runs, self.on_evaluation, self.is_over)

    def _with_chosen_tiers(self, options: Options) -> CascadePlan:
        """The best plan over the forms of the candidates."""
        site, demand = self.site, self.demand
        everything = dataclasses.replace(
            site, grading=None, drafts_on_many=True
        )  # as the first tier of a form has none
        alone, unfit = deployer_for(
            everything, demand, gpus=options.gpus, dispatch=options.dispatch, objective=options.objective
        )
        evaluations = 0

        def progress(total: int) -> None:
            nonlocal evaluations
            evaluations = total
            self.on_evaluation(total)

        def searched(form: Form, within: Options, factor: float = 1.0) -> CascadePlan:
            """The best plan of a form; with a factor for the rate, any that meets the targets there."""
            before = evaluations
            (part, own), *others = (form.of(site, one.scaled(factor)) for one in (demand, *self.runs))
            planner = _Planner(part, own, [run for _, run in others], lambda n: progress(before + n), self.is_over)
            search = PlanSearch(part, within, planner.on_evaluation)
            if factor != 1.0:
                return search.checked_plan(own, planner.runs)
            if form.routed:
                return search.plan(own, planner.runs).as_routed
            return planner._of_all_tiers(within)

        def reaches(form: Form, within: Options, rate_per_s: float) -> bool:
            assert demand.rate_per_s is not None
            try:
                searched(form, within, rate_per_s / demand.rate_per_s)
            except Unreachable:
                return False
            return True

        def deployer(form: Form, within: Options) -> Deployer:
            part, own = form.of(site, demand)
            return PlanSearch(part, within).deployer(own)[0]

        how = (searched, reaches, deployer, bool(self.runs), self.is_over)
        return FormChoice(site, demand, options, alone, unfit, *how).best()

    def _of_best_form(self, options: Options) -> CascadePlan:
        """The best plan without rules: of one model, a pair or a chain of up to MOST_TIERS of the tiers, or with prompts
        routed to as many; the others are not used."""
        any_form = dataclasses.replace(options, max_tiers=min(len(self.site.tiers), MOST_TIERS))
        plan = self._with_chosen_tiers(any_form)
        return self._of_stated(plan, options) if len(plan.tiers) < len(self.site.tiers) else plan

    def _of_stated(self, plan: CascadePlan, options: Options) -> CascadePlan:
        """The plan of some of the tiers as one of all tiers."""
        site, demand, runs = self.site, self.demand, self.runs
        if plan.goal is Goal.RATE and plan.rate_per_s is not None and demand.rate_per_s is not None:
            factor = plan.rate_per_s / demand.rate_per_s
            demand, runs = demand.scaled(factor), [run.scaled(factor) for run in runs]
        serving = {tier.name: tier for tier in plan.tiers}
        limits = dict(zip(serving, (*plan.rules.skip_for, None), strict=True)) if plan.is_routed else {}
        rules = AcceptanceRules(skip_for=tuple(map(limits.get, site.tiers[:-1]))) if limits else NO_RULES
        thresholds = dict(zip(serving, (*plan.thresholds, 0.0), strict=True))  # the last one that serves accepts all
        strategies = tuple(serving[name].strategy if name in serving else NOTHING for name in site.tiers)
        deployment = Deployment(tuple(s.gpus for s in strategies), strategies, plan.solution.deployment.latency_s)
        solution = dataclasses.replace(
            plan.solution,
            thresholds=tuple(thresholds.get(name, SKIPPED) for name in site.tiers[:-1]),
            deployment=deployment,
        )
        demand, runs = demand.under(rules), [run.under(rules) for run in runs]
        deployer, unfit = PlanSearch(site, options).deployer(demand)
        whole = with_runs(site, outcome(site, demand, solution, deployer, unfit), runs)
        return dataclasses.replace(whole, goal=plan.goal, choice=plan.choice, simulations=plan.simulations, rules=rules)


def _not_promised(
    new: NewPrompts, options: Options, requested: float, needed: float, error: Unreachable, prompts: int
) -> Unreachable:
    """Why a quality cannot be promised, with what can."""
    most = error.best
    for _ in range(NEARER):  # a promise needs a little more or less for another quality
        most = error.best - (new.needed(most) - most)
    return Unreachable(
        f"{error} (quality {requested:g} on new prompts, with a confidence of {options.confidence:.0%}, is {needed:.2f} on "
        f"{prompts} judged ones; {rounded_down(most)} can be had: ask for less of either, or judge more)",
        most,
        Binds.MIN_QUALITY,
    )


def chosen_of(plan: CascadePlan, site: Site, demand: Demand) -> tuple[Site, Demand]:
    """What the plan is for: the site and the demand of the tiers that were chosen; where none were, both as they are."""
    if plan.choice is None:
        return site, demand
    tiers = [site.tiers.index(tier.name) for tier in plan.tiers]
    return site.only(tiers), demand.only(tiers)
