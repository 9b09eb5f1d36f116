"""Rules of routing that are chosen together with thresholds and deployment: plans for several rules, of which the best is
taken. No I/O.

Under a rule, the judged prompts and the requests know what it does to them, and everything else is planned as without one,
with the same targets and guarantees. Rules are tried tier by tier, from the first to the last but one. No rule is always
among them, so a plan with a rule is never worse than the plan without, by the goal's measure. Nothing is proved over rules.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from planner_service.cascade_plan import CascadePlan
from planner_service.planning_options import Goal
from planner_service.routing.solution import Unreachable

Rule = TypeVar("Rule")


def best_rule(
    plan: Callable[[tuple[Rule | None, ...]], CascadePlan], candidates: Sequence[Sequence[Rule]], goal: Goal
) -> tuple[tuple[Rule | None, ...], CascadePlan]:
    """(the rules of the tiers but the last, the plan). plan: the best one under such rules. candidates: by tier.

    Raises:
        Unreachable: There is no plan under any rule; the error is that without one.
    """
    best: tuple[Rule | None, ...] = (None,) * len(candidates)
    best_plan: CascadePlan | None = None
    failure: Unreachable | None = None
    try:
        best_plan = plan(best)
    except Unreachable as error:
        failure = error
    for tier, of_tier in enumerate(candidates):
        for candidate in of_tier:
            rules = (*best[:tier], candidate, *best[tier + 1 :])
            try:
                tried = plan(rules)
            except Unreachable:
                continue
            if best_plan is None or tried.rank(goal) < best_plan.rank(goal):
                best, best_plan = rules, tried
    if best_plan is None:
        assert failure is not None
        raise failure
    return best, best_plan
