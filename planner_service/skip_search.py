"""Thresholds, deployment and skip rule chosen together: plans for several skip rules, of which the best is taken. No I/O.

Under a skip rule the judged prompts and the requests know which tiers they pass over, and everything else is planned as
without one, with the same targets and guarantees. Limits are tried tier by tier, from the first to the last but one, at
quantiles of the predicted scores. No rule is always among them, so a plan with a rule is never worse than the plan without,
by the goal's measure. Nothing is proved over rules.
"""

from collections.abc import Callable

import numpy as np

from planner_service.cascade_plan import CascadePlan
from planner_service.planning_options import Goal
from planner_service.routing.quality import JudgedSample
from planner_service.routing.solution import Unreachable
from services.domain.errors import invalid

QUANTILES = (0.15, 0.3, 0.45, 0.6)

Limits = tuple[float | None, ...]


def rules_tried(tiers: int) -> int:
    """How many rules `best_rule` looks at, at most."""
    return 1 + (tiers - 1) * len(QUANTILES)


def best_rule(plan: Callable[[Limits], CascadePlan], judged: JudgedSample, goal: Goal) -> tuple[Limits, CascadePlan]:
    """(limits of the tiers but the last, the plan). plan: the best one under a rule.

    Raises:
        InvalidRequest: The judged prompts have no predicted scores.
        Unreachable: There is no plan under any rule; the error is that without one.
    """
    if judged.predicted is None:
        raise invalid("skip", "needs a column {tier}_predicted_score of every tier: see `penstock predictor`")
    best: Limits = (None,) * (len(judged.tiers) - 1)
    best_plan: CascadePlan | None = None
    failure: Unreachable | None = None
    try:
        best_plan = plan(best)
    except Unreachable as error:
        failure = error
    for tier in range(len(best)):
        for limit in candidates(judged, tier):
            rule = (*best[:tier], limit, *best[tier + 1 :])
            try:
                tried = plan(rule)
            except Unreachable:
                continue
            if best_plan is None or tried.rank(goal) < best_plan.rank(goal):
                best, best_plan = rule, tried
    if best_plan is None:
        assert failure is not None
        raise failure
    return best, best_plan


def candidates(judged: JudgedSample, tier: int) -> list[float]:
    """Limits at which shares of the prompts pass the tier over, ascending."""
    assert judged.predicted is not None
    return sorted({round(float(q), 1) for q in np.quantile(judged.predicted[:, tier], QUANTILES)} - {0.0})
