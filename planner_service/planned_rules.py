"""Plans whose routing has rules besides thresholds: early checks, a skip rule, a rule for long answers, the best answer of
each request as its reply. No I/O.

Each is chosen by planning several times, without the rule and under it, with the same targets and guarantees.
"""

import dataclasses
from collections.abc import Callable, Sequence

from planner_service import long_answer_search, skip_search
from planner_service.cascade_plan import CascadePlan
from planner_service.early_rules import NEEDS_PARTS, fitted_rules, outcomes_of
from planner_service.planning_options import Options
from planner_service.routing.rules import RoutingRules
from planner_service.routing.solution import Proof, Unreachable
from planner_service.rule_search import best_rule
from planner_service.site import Demand, Site
from services.domain.errors import invalid

EARLY_FITS = 3  # times that early checks are fitted to the thresholds that they led to

Plan = Callable[[Demand, Sequence[Demand], Options], CascadePlan]
"""The best plan for a demand, other stretches of the same workload, and options."""


def with_early_checks(
    plan: Plan, site: Site, demand: Demand, runs: Sequence[Demand], options: Options, error: float
) -> CascadePlan:
    """The plan without early checks; or, where it is better, one with checks that are fitted to its thresholds.

    Where a tier has checks, its threshold is not lowered: by a lower one, more answers would stand that they reject, and the
    error would be over the stated one. It can also be so because a tier before it changed, and with it the prompts that reach
    the checked one: then checks are fitted to the new thresholds, and it is planned once more.

    Raises:
        InvalidRequest: There are no scores of unfinished answers; judging is a load, or tiers are remote: what checks cost
            there is not simulated.
    """
    if any(one.judged.parts is None for one in (demand, *runs)):
        raise invalid("early_error", NEEDS_PARTS)
    if any(one.requests.parts is None for one in (demand, *runs)):
        raise invalid("early_error", "not with the lengths of the trace: its answers have no parts that were scored")
    if site.grading is not None or site.remotes:
        raise invalid(
            "early_error", "not where what judges is stated, or with remote tiers: their load is not simulated"
        )
    within = dataclasses.replace(options, early_error=None)
    plain = plan(demand, runs, within)
    # as the skip rule and the rule for long answers have it
    passing, others = ([one.under(plain.rules) for one in some] for some in ((demand,), runs))
    within = dataclasses.replace(within, skip=False, long_answers=False, best_answer=False)
    checked = plain
    for _ in range(EARLY_FITS):
        fitted_to = checked.thresholds
        rules = fitted_rules(site, passing[0].judged, fitted_to, error)
        if not any(rule.checks for rule in rules):
            return dataclasses.replace(plain, early_reason=f"none rejects anything with an error of {error:.2%}")
        try:
            checking = [run.checking(rules, fitted_to) for run in others]
            checked = plan(passing[0].checking(rules, fitted_to), checking, within)
        except Unreachable as unreachable:
            return dataclasses.replace(plain, early_reason=f"with them, no plan meets the targets: {unreachable}")
        early = outcomes_of(passing[0].judged, rules, checked.thresholds)
        if all(outcome.error is None or outcome.error <= error for outcome in early):
            break
    else:
        reason = f"with the thresholds that they lead to, they reject more than {error:.2%} of what stands"
        return dataclasses.replace(plain, early_reason=reason)
    if plain.rank(options.aim) <= checked.rank(options.aim):
        return dataclasses.replace(plain, early_reason="the plan is no better with them")
    return dataclasses.replace(
        _unproved(checked),  # other checks may be better
        skip_below=plain.skip_below,
        long_answers=plain.long_answers,
        best_answer=plain.best_answer,
        early=early,
    )


def with_best_answer(plan: Plan, demand: Demand, runs: Sequence[Demand], options: Options) -> CascadePlan:
    """The better of two plans: replies are the last answers of requests, or their best ones. Each has its own other rules.

    Nothing is proved of the one that is taken: the other kind may have a better plan than the one that it was compared with.
    A single tier has one answer, which is both.

    Raises:
        Unreachable: Neither meets the targets; the error is that of the one that comes nearer.
    """
    if len(demand.judged.tiers) == 1:
        return plan(demand, runs, dataclasses.replace(options, best_answer=False))
    within = dataclasses.replace(_each_of(options, 2), best_answer=False)
    plans, failures = list[CascadePlan](), list[Unreachable]()
    for best_answer in (False, True):
        rules = RoutingRules(best_answer=best_answer)
        try:
            planned = plan(demand.under(rules), [run.under(rules) for run in runs], within)
            plans.append(dataclasses.replace(planned, best_answer=best_answer))
        except Unreachable as error:
            failures.append(error)
    if not plans:
        raise min(failures, key=lambda error: error.distance)
    return _unproved(_promising(min(plans, key=lambda one: one.rank(options.aim)), options))


def with_skip_rule(plan: Plan, demand: Demand, runs: Sequence[Demand], options: Options) -> CascadePlan:
    """The best plan over skip rules.

    Raises:
        InvalidRequest: The judged prompts have no predicted scores.
        Unreachable: There is no plan under any rule; the error is that without one.
    """
    limits_tried = skip_search.candidates(demand.judged)
    within = dataclasses.replace(_each_of(options, skip_search.rules_tried(len(demand.judged.tiers))), skip=False)

    def under(limits: skip_search.Limits) -> CascadePlan:
        return plan(demand.skipping(limits), [run.skipping(limits) for run in runs], within)

    limits, best = best_rule(under, limits_tried, options.aim)
    return dataclasses.replace(_taken(best, limits, options), skip_below=limits)


def with_long_answers(plan: Plan, demand: Demand, runs: Sequence[Demand], options: Options) -> CascadePlan:
    """The best plan over rules for long answers, all under the skip rule that is best without any.

    Raises:
        Unreachable: There is no plan under any rule; the error is that without one.
    """
    within = _each_of(options, long_answer_search.rules_tried(len(demand.judged.tiers)))
    within = dataclasses.replace(within, long_answers=False)
    plain: CascadePlan | None = None

    def under(rules: long_answer_search.Rules) -> CascadePlan:
        nonlocal plain
        if not any(rules):
            plain = plan(demand, runs, within)
            return plain
        taken = RoutingRules(() if plain is None else plain.skip_below, rules)
        with_skip = dataclasses.replace(within, skip=within.skip and plain is None)
        return plan(demand.under(taken), [run.under(taken) for run in runs], with_skip)

    rules, best = best_rule(under, long_answer_search.candidates(demand.judged), options.aim)
    rules = tuple(rule if h <= 100 else None for rule, h in zip(rules, best.thresholds, strict=True))  # of tiers in use
    skip_below = best.skip_below if plain is None else plain.skip_below
    return dataclasses.replace(_taken(best, rules, options), skip_below=skip_below, long_answers=rules)


def _each_of(options: Options, plans: int) -> Options:
    """The options of each of so many plans, with a guarantee that holds for the one that is taken."""
    if options.confidence is None:
        return options
    return dataclasses.replace(options, confidence=1 - (1 - options.confidence) / plans)


def _promising(best: CascadePlan, options: Options) -> CascadePlan:
    """The plan that is taken of several, with the confidence that holds for it."""
    if best.promise is None or options.confidence is None:
        return best
    return dataclasses.replace(best, promise=dataclasses.replace(best.promise, confidence=options.confidence))


def _taken(best: CascadePlan, rules: Sequence[object], options: Options) -> CascadePlan:
    """The best of the plans under several rules: other rules may be better than those that were tried."""
    best = _promising(best, options)
    if all(rule is None for rule in rules):
        return best
    return _unproved(best)


def _unproved(plan: CascadePlan) -> CascadePlan:
    """The plan, of which nothing is proved."""
    return dataclasses.replace(plan, solution=dataclasses.replace(plan.solution, proof=Proof.SEARCHED, gap=None))
