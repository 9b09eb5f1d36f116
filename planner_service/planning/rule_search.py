"""Plans with rules other than thresholds: a skip rule, a rule for long answers, best answers. No I/O.

First the plan without rules, of the best form; then plans under the most promising choices of all rules together, by
`rule_ranking`. All have the same targets and guarantees, and a plan with rules is taken only where it is better by the goal.
So it is never worse than the plan without. Nothing is proved over rules.

What is simulated for all of them is at most four times what it takes for the plan without rules (AT_MOST), or
LEAST_SIMULATIONS.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from penstock.planner_service.planning.cascade_choice import chosen_instead
from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.planning.one_plan import PlanSearch, TooManySimulations
from penstock.planner_service.question.planning_options import Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.routing.quality import route
from penstock.planner_service.routing.solution import Proof, Unreachable
from penstock.planner_service.rules.rule_ranking import Known, RankedRules, RuleRanking
from penstock.services.acceptance.pipeline import NO_RULES, asked, asked_of_plans, candidates, kinds_of, of_tiers
from penstock.types.rules import AcceptanceRules

MOST_PLANNED = 8  # choices of rules that are planned with
LEAST_SIMULATIONS = 2000  # that may be made in any case: about a second
AT_MOST = 3.75
"""Times the plan without rules: what all may take. A plan that takes more is given up before its next routing, so all of it
is less than four times."""


class RuleSearch:
    """Of one question. runs, is_over: as in `plan_cascade`."""

    def __init__(
        self,
        site: Site,
        demand: Demand,
        options: Options,
        runs: Sequence[Demand],
        on_evaluation: Callable[[int], None],
        is_over: Callable[[], bool],
    ) -> None:
        self._site, self._demand, self._options, self._runs, self._is_over = site, demand, options, runs, is_over
        chosen = asked(options.rules)
        self._most = MOST_PLANNED if any(rule.of_tiers for rule in chosen) else len(chosen)
        self._search = PlanSearch(site, options.without_rules, on_evaluation)
        self._last = 0  # simulations of the last plan

    def plan(self, plain: CascadePlan | None = None) -> CascadePlan:
        """The best plan. plain: without rules, of the best form of these tiers; None where it is to be made, of all of them.

        Raises:
            Unreachable: There is no plan under any rules that were tried; the error is of what comes nearest.
        """
        options, best, failures = self._options, plain, list[Unreachable]()
        before = 0 if plain is None else plain.simulations
        try:
            best = best or self._under(NO_RULES)
        except Unreachable as error:
            failures.append(error)
        else:
            self._search.most_simulations = AT_MOST * max(before or self._last, LEAST_SIMULATIONS / AT_MOST) - before
        for choice in self._ranked(best)[: self._most] if len(self._site.tiers) > 1 else ():
            # no plan is begun that is over the limit if it takes as many as the last one
            is_over = best is not None and self._is_over()
            if is_over or self._search.simulations + self._last > self._search.most_simulations:
                break
            try:
                tried = self._under(choice.rules, choice.thresholds, 0.0 if best is None else best.rate_per_s or 0.0)
            except Unreachable as error:
                failures.append(error)
                continue
            except TooManySimulations:
                break
            if best is None or tried.rank(options.aim) < best.rank(options.aim):
                best = tried
        if best is None:
            raise min(failures, key=lambda error: error.distance)
        chosen = None if plain is None else chosen_instead(plain, best)
        return dataclasses.replace(best, simulations=before + self._search.simulations, choice=chosen)

    def _under(self, rules: AcceptanceRules, begin: tuple[float, ...] = (), least_per_s: float = 0.0) -> CascadePlan:
        """The best plan under these rules. begin: thresholds to begin with. least_per_s: see `PlanSearch.plan`."""
        if begin:
            self._search.begin.append(begin)
        before, runs = self._search.simulations, [run.under(rules) for run in self._runs]
        try:
            plan = self._search.plan(self._demand.under(rules), runs, least_per_s)
        finally:
            self._last = self._search.simulations - before
        used, solution = _in_use(rules, plan.thresholds), plan.solution
        if any(kinds_of(used)) or asked_of_plans(self._options.rules) != NO_RULES:  # nothing is proved over rules
            solution = dataclasses.replace(solution, proof=Proof.SEARCHED, gap=None)
        return dataclasses.replace(plan, rules=used, solution=solution)

    def _ranked(self, plain: CascadePlan | None) -> list[RankedRules]:
        """Choices of rules that differ in what they do, the most promising first."""
        options, demand = self._options, self._demand
        judged, known = demand.judged, None
        begin = list(dict.fromkeys((NO_RULES, asked_of_plans(options.rules))))
        if plain is not None and not plain.is_routed:
            known = Known(plain.thresholds, plain.felt_s)
        deployer, _ = self._search.deployer(demand)
        ranking = RuleRanking(demand, deployer, options, self._site.judge_s, known)
        stages = candidates(judged, options.rules)
        result, seen = list[RankedRules](), set[tuple[tuple[float, ...], bytes]]()
        for one in ranking.ranked(stages, begin):
            if one.value == math.inf or not any(kinds_of(_in_use(one.rules, one.thresholds))):
                continue
            routed = route(judged.under(one.rules), one.thresholds)
            key = one.thresholds, routed.processed.tobytes() + routed.answered.tobytes()
            if key not in seen:
                seen.add(key)
                result.append(one)
        # by turns the best and the best of another kind: estimates of a kind err alike
        kinds = [_kind(one) for one in result]
        others = [one for at, one in enumerate(result) if kinds[at] not in kinds[:at]]
        result = list(dict.fromkeys(one for pair in itertools.zip_longest(result, others) for one in pair if one))
        return result or [RankedRules(math.inf, (), rules) for rules in begin[1:]]


def _in_use(rules: AcceptanceRules, thresholds: Sequence[float]) -> AcceptanceRules:
    """The rules of tiers that are used; None of each other tier for what may be chosen."""
    return of_tiers(rules, [threshold <= 100 for threshold in thresholds])


def _kind(one: RankedRules) -> tuple[object, ...]:
    """Which rules there are, and which tiers are used."""
    return *kinds_of(_in_use(one.rules, one.thresholds)), *(threshold <= 100 for threshold in one.thresholds)
