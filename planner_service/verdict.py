"""A plan in a sentence: what it takes of the cluster, what breaks first, what more quality would cost. No I/O."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner_service.cascade_plan import CascadePlan
from planner_service.planning_options import Goal, Options
from planner_service.routing.solution import Unreachable
from planner_service.site import Demand, Site

QUALITY_STEP = 1.0  # points

Plan = Callable[[Demand, Options], CascadePlan]


@dataclass(frozen=True, slots=True)
class NextStep:
    """What at least QUALITY_STEP more quality takes, all else as it is planned. None where no plan has it.

    min_quality: that was requested. gpus, dollars_per_hour, latency_s, rate_per_s: more than this plan has; dollars None
    without prices, a rate None where the arrivals have none. reason: why there is no plan; else empty.
    """

    min_quality: float
    gpus: int = 0
    dollars_per_hour: float | None = None
    latency_s: float = 0.0
    rate_per_s: float | None = None
    reason: str = ""


def next_step(plan: CascadePlan, demand: Demand, options: Options, planned: Plan) -> NextStep:
    """Plan for more quality with the same goal; for the goal quality, whose latency is used up, with the least latency.

    planned: plans for a demand and options.
    """
    quality = plan.quality + QUALITY_STEP
    requested = dataclasses.replace(
        options, min_quality=min(quality, 100.0), goal=plan.goal, burst_floor=None, burst_mean=None
    )
    if plan.goal is Goal.QUALITY:
        requested = dataclasses.replace(requested, goal=Goal.LATENCY, max_latency_s=None)
    if quality > 100:
        return NextStep(quality, reason="scores end at 100")
    try:
        more = planned(demand, requested)
    except Unreachable as error:
        return NextStep(quality, reason=str(error))
    rates = more.rate_per_s, plan.rate_per_s
    dollars = more.dollars_per_hour, plan.dollars_per_hour
    return NextStep(
        quality,
        more.gpus - plan.gpus,
        None if dollars[0] is None or dollars[1] is None else dollars[0] - dollars[1],
        more.felt_s - plan.felt_s,
        None if rates[0] is None or rates[1] is None else rates[0] - rates[1],
    )


def verdict(site: Site, plan: CascadePlan, step: NextStep | None = None) -> str:
    """`31 of 32 GPUs; medium breaks first, at 1.2x the rate; one point more quality costs 4 GPUs`."""
    return "; ".join([*_chosen(plan), _taken(site, plan), *_breaks(plan), *_more(plan, step), *_assumed(plan)])


def _chosen(plan: CascadePlan) -> Sequence[str]:
    """`small + large of 4 candidates`: the tiers that serve, where they were chosen."""
    if plan.choice is None:
        return []
    names = " + ".join(tier.name for tier in plan.tiers if tier.strategy.used)
    return [f"{names} of {len(plan.choice.candidates)} candidates"]


def _taken(site: Site, plan: CascadePlan) -> str:
    used: dict[str, int] = {}
    for tier in plan.tiers:
        for replica, count in tier.strategy.replicas:
            used[replica.shape.gpu] = used.get(replica.shape.gpu, 0) + replica.shape.gpus * count
    if site.more:
        taken = ", ".join(f"{used[each.name]} of {each.gpus} {each.name}" for each in site.types if each.name in used)
    else:
        taken = f"{plan.gpus} of {site.gpus} GPUs"
    remote = " and ".join(tier.name for tier in plan.tiers if tier.strategy.remote is not None)
    if remote:
        tokens = sum(tier.strategy.remote_dollars_per_hour for tier in plan.tiers)
        taken += f" and {tokens:,.2f} dollars per hour for tokens of {remote}, together"
    return taken if plan.dollars_per_hour is None else f"{taken} for {plan.dollars_per_hour:,.2f} dollars per hour"


def _breaks(plan: CascadePlan) -> Sequence[str]:
    if plan.load is None:
        return []
    if plan.load.overloaded:
        return [
            f"overloaded: {plan.load.tier} keeps up with {plan.load.sustained_per_s / plan.load.offered_per_s:.2f}x the rate"
        ]
    return [f"{plan.load.tier} breaks first, at {plan.load.sustained_per_s / plan.load.offered_per_s:.2g}x the rate"]


def _assumed(plan: CascadePlan) -> Sequence[str]:
    return [f"{plan.cached_share:.0%} of the prompt tokens count as cached"] if plan.cached_share > 0 else []


def _more(plan: CascadePlan, step: NextStep | None) -> Sequence[str]:
    if step is None:
        return []
    if step.reason:
        return [f"no plan has a quality of {step.min_quality:.1f}"]
    what = f"{QUALITY_STEP:g} point more quality"
    if plan.goal is Goal.RATE and step.rate_per_s is not None:
        return [f"{what} takes {-step.rate_per_s:.2g} requests/s off the rate"]
    if plan.goal is Goal.COST:
        gpus = f"{abs(step.gpus)} {'more' if step.gpus >= 0 else 'fewer'} GPU{'' if abs(step.gpus) == 1 else 's'}"
        dollars = "" if step.dollars_per_hour is None else f" and {step.dollars_per_hour:,.2f} dollars per hour more"
        return [f"{what} costs {gpus}{dollars}"]
    return [f"{what} costs {max(0.0, step.latency_s):.2g} s of latency"]
