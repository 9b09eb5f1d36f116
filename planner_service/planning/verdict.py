"""A plan in a sentence: what it takes of the cluster, what breaks first, what more quality would cost. No I/O."""

import dataclasses
from collections import Counter
from collections.abc import Callable

from penstock.planner_service.planning.cascade_choice import form_words
from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.question.planning_options import Goal, Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.routing.solution import Unreachable
from penstock.types.planned import NextStep

QUALITY_STEP = 1.0  # points
LEAST_LOAD = 0.1  # of what a plan's GPUs sustain; below, any plan would do
MOST_GAP = 0.25  # to the least cost that another plan may have, which still says something

Plan = Callable[[Demand, Options], CascadePlan]


def next_step(plan: CascadePlan, demand: Demand, options: Options, planned: Plan) -> NextStep:
    """What QUALITY_STEP more quality takes: plan for more quality with the same goal; for the goal quality, whose latency is
    used up, with the least latency.

    planned: plans for a demand and options.
    """
    quality = plan.quality + QUALITY_STEP
    requested = dataclasses.replace(options, confidence=None, min_quality=min(quality, 100.0), goal=plan.goal)
    if plan.goal is Goal.QUALITY:
        requested = dataclasses.replace(requested, goal=Goal.LATENCY, max_latency_s=None)
    if quality > 100:
        return NextStep(quality, reason="scores end at 100")
    try:
        more = planned(demand, requested)
    except Unreachable as error:
        return NextStep(quality, reason=str(error))
    dollars = _difference(more.dollars_per_hour, plan.dollars_per_hour)
    rate_per_s = _difference(more.rate_per_s, plan.rate_per_s)
    return NextStep(quality, more.gpus - plan.gpus, dollars, more.felt_s - plan.felt_s, rate_per_s)


def _difference(value: float | None, before: float | None) -> float | None:
    return None if value is None or before is None else value - before


def verdict(site: Site, plan: CascadePlan, step: NextStep | None = None) -> str:
    """`31 of 32 GPUs; medium breaks first, at 1.2x the rate; one point more quality costs 4 GPUs`."""
    parts = (_chosen(plan), _taken(site, plan), _saved(plan), _runner_up(plan), _gap(plan))
    return "; ".join(filter(None, (*parts, _breaks(plan), _more(plan, step), _assumed(plan))))


def _chosen(plan: CascadePlan) -> str:
    """`small + large of 4 candidates`, `small or large by a predictor of 4 candidates`: the form, where it was chosen."""
    if plan.choice is None:
        return ""
    names = form_words([tier.name for tier in plan.tiers if tier.strategy.used], routed=plan.is_routed)
    return f"{names}{',' if plan.is_routed else ''} of {len(plan.choice.tiers)} candidates"


def _taken(site: Site, plan: CascadePlan) -> str:
    used = Counter[str]()
    for tier in plan.tiers:
        for replica, count in tier.strategy.replicas:
            used[replica.shape.gpu] += replica.shape.gpus * count
    if site.more:
        taken = ", ".join(f"{used[each.name]} of {each.gpus} {each.name}" for each in site.types if each.name in used)
    else:
        taken = f"{plan.gpus} of {site.gpus} GPUs"
    remote = " and ".join(tier.name for tier in plan.tiers if tier.strategy.remote is not None)
    if remote:
        tokens = sum(tier.strategy.remote_dollars_per_hour for tier in plan.tiers)
        taken += f" and {tokens:,.2f} dollars per hour for tokens of {remote}, together"
    return taken if plan.dollars_per_hour is None else f"{taken} for {plan.dollars_per_hour:,.2f} dollars per hour"


def _runner_up(plan: CascadePlan) -> str:
    """`the runner-up, small + medium + large, takes 14 GPUs and 56.00 dollars per hour`."""
    if plan.choice is None or plan.goal is not Goal.COST or (other := plan.choice.runner_up) is None:
        return ""
    return f"the runner-up, {form_words(other.tiers, routed=other.routed)}, takes {other.cost.words}"


def _gap(plan: CascadePlan) -> str:
    """`no plan costs less`, `no plan costs over 4.3 % less`."""
    gap = plan.solution.gap
    if plan.choice is None or plan.goal is not Goal.COST or gap is None or gap > MOST_GAP:
        return ""
    return "no plan costs less" if gap == 0 else f"no plan costs over {100 * gap:.2g} % less"


def _saved(plan: CascadePlan) -> str:
    """`5 GPUs fewer and 12.50 dollars per hour less than large alone, which takes 16 GPUs and 40.00 dollars per hour`."""
    if (alone := plan.largest_alone) is None:
        return ""
    if [tier.name for tier in plan.tiers if tier.strategy.used] == [alone.tier]:
        return "no cascade costs less than this model alone"
    gpus = alone.cost.gpus - plan.gpus
    saved = [f"{abs(gpus)} GPU{'' if abs(gpus) == 1 else 's'} {'fewer' if gpus >= 0 else 'more'}"]
    if plan.dollars_per_hour is not None and alone.cost.dollars_per_hour is not None:
        dollars = alone.cost.dollars_per_hour - plan.dollars_per_hour
        saved.append(f"{abs(dollars):,.2f} dollars per hour {'less' if dollars >= 0 else 'more'}")
    assumed = ", more than there are" if alone.assumed else ""
    return f"{' and '.join(saved)} than {alone.tier} alone, which takes {alone.cost.words}{assumed}"


def _breaks(plan: CascadePlan) -> str:
    if (load := plan.load) is None:
        return ""
    if load.offered_per_s < LEAST_LOAD * load.sustained_per_s:
        share = load.offered_per_s / load.sustained_per_s
        return f"warning: the rate is {share:.0%} of what these GPUs sustain, too little to choose by"
    times = load.sustained_per_s / load.offered_per_s
    if load.overloaded:
        return f"overloaded: {load.tier} keeps up with {times:.2f}x the rate"
    return f"{load.tier} breaks first, at {times:.2g}x the rate"


def _assumed(plan: CascadePlan) -> str:
    return f"{plan.cached_share:.0%} of the prompt tokens count as cached" if plan.cached_share > 0 else ""


def _more(plan: CascadePlan, step: NextStep | None) -> str:
    if step is None:
        return ""
    if step.reason:
        return f"no plan has a quality of {step.min_quality:.1f}"
    what = f"{QUALITY_STEP:g} point more quality"
    if plan.goal is Goal.RATE and step.rate_per_s is not None:
        return f"{what} takes {-step.rate_per_s:.2g} requests/s off the rate"
    if plan.goal is Goal.COST:
        gpus = f"{abs(step.gpus)} {'more' if step.gpus >= 0 else 'fewer'} GPU{'' if abs(step.gpus) == 1 else 's'}"
        dollars = "" if step.dollars_per_hour is None else f" and {step.dollars_per_hour:,.2f} dollars per hour more"
        return f"{what} costs {gpus}{dollars}"
    return f"{what} costs {max(0.0, step.latency_s):.2g} s of latency"
