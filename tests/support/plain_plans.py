"""Plans for the slowest tier that may be overloaded: the paper's, and the quickest to find."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from penstock.planner_service.planning import plan_cascade as planning
from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.question.planning_options import Options
from penstock.planner_service.question.site import Demand, Site
from penstock.types.planning import Objective
from penstock.types.rules import RuleOptions

RULES = [field.name for field in dataclasses.fields(RuleOptions)]


def plain_options(**fields: Any) -> Options:
    """fields: of PlanOptions, and those of RuleOptions beside them. With max_utilisation, a plan may not be overloaded."""
    rules = RuleOptions(**{name: fields.pop(name) for name in RULES if name in fields})
    if fields.setdefault("max_utilisation", None) is None:
        fields |= {"max_utilisation": 0.75, "allow_overload": True}
    usual: dict[str, Any] = {"objective": Objective.LARGEST_TIER, "seed": 0, "rules": rules}
    return Options(**usual | fields)


def plan_cascade(
    site: Site, demand: Demand, options: Options | None = None, *, runs: Sequence[Demand] = (), **fields: Any
) -> CascadePlan:
    """fields: of options, see plain_options, or other than those that are given."""
    if options is not None:
        rules = {name: fields.pop(name) for name in RULES if name in fields}
        options = dataclasses.replace(options, rules=dataclasses.replace(options.rules, **rules), **fields)
    return planning.plan_cascade(site, demand, options or plain_options(**fields), runs=runs)
