"""Simulations of deployments, and of plan files."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from penstock.planner_service.api.slos import REPLAYED, attainments
from penstock.planner_service.codecs.plan_file import PlanFile
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.files.measured import workload_of
from penstock.planner_service.files.quality import judged_for
from penstock.planner_service.files.site import site_of
from penstock.planner_service.planning.cascade_plan import felt_in
from penstock.planner_service.question.demand import demand_of
from penstock.planner_service.question.planned_drafts import with_planned_drafters
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.replay.slo_classes import WorkloadClass
from penstock.planner_service.routing.quality import SKIPPED, route
from penstock.question_files.questions import load_cluster, load_models, load_quality
from penstock.services.acceptance.pipeline import OF_TIERS, tier_problems
from penstock.services.domain.errors import check, invalid
from penstock.services.domain.hardware import ReplicaShape
from penstock.types.deployments import DeployedTier, Deployment
from penstock.types.planned import CascadePlan
from penstock.types.planning import JudgedPrompts, PlanningQuestion, PlanOptions, Trace
from penstock.types.ranges import range_problems
from penstock.types.rules import AcceptanceRules, rules_of
from penstock.types.simulated import Simulation

Shapes = tuple[tuple[tuple[ReplicaShape, int], ...], ...]  # by tier


def simulate(question: PlanningQuestion, deployment: Deployment) -> Simulation:
    """A deployment on a question's site, serving requests as the question has them: 2,000 if it does not say how many.

    Raises:
        InvalidRequest: A field is unsound, or does not go with the others; names it.
    """
    site = site_of(question.cluster, question.models)
    return simulate_on(site, question.trace, question.quality, question, deployment)


def simulate_on(
    site: Site,
    trace: Trace,
    quality: JudgedPrompts,
    drawn: PlanOptions,
    deployment: Deployment,
    *,
    classes: Sequence[WorkloadClass] = (),
) -> Simulation:
    """A deployment on a site. drawn: how requests are. classes: of requests, whose SLO attainment is reported.

    Raises:
        InvalidRequest: As `simulate`.
    """
    check(range_problems(deployment, "deployment"))
    if len(deployment.tiers) != len(site.tiers):
        raise invalid("deployment.tiers", f"the cascade has {len(site.tiers)}, not {len(deployment.tiers)}")
    arrivals = workload_of(trace)
    demand = demand_of(
        arrivals.uncached() if drawn.ignore_cached else arrivals,
        judged_for(quality, site),
        requests=min(REPLAYED, len(arrivals)) if drawn.requests is None else drawn.requests,
        seed=drawn.seed,
        lengths=drawn.lengths,
        rate=drawn.rate,
    )
    rules = _rules(deployment, demand, drawn)
    demand, strategies = demand.under(rules), strategies_of(shapes_of(deployment), site)
    thresholds = tuple(SKIPPED if one.threshold is None else one.threshold for one in deployment.tiers[:-1])
    run = run_cascade(site, demand, thresholds, strategies, deployment.dispatch)
    felt = felt_in(run)
    return Simulation(
        len(run.total_s),
        route(demand.requests, thresholds).quality,
        demand.cached_share,
        felt.end_to_end,
        felt,
        run.reports,
        attainments(site, demand, thresholds, strategies, classes, drawn.seed),
    )


def simulate_plan(
    file: PlanFile, trace: Trace, drawn: PlanOptions, *, classes: Sequence[WorkloadClass] = ()
) -> Simulation:
    """The plan of a file, on its own site, for a trace. drawn: how requests are, and distributed.

    Raises:
        FileError: An input file of the plan cannot be used.
        InvalidRequest: As `simulate`; or what the plan needs is not in its input files any more.
    """
    site = planned_site(file)
    quality = load_quality(file.inputs.quality, site.tiers)
    deployment = dataclasses.replace(deployment_of(file.plan), dispatch=drawn.dispatch)
    return simulate_on(site, trace, quality, drawn, deployment, classes=classes)


def planned_site(file: PlanFile) -> Site:
    """The site of a plan's own input files, with the drafters of the plan; of candidates, the tiers that were chosen.

    Raises:
        FileError: A file cannot be used.
        InvalidRequest: A chosen tier or a drafter of the plan is not in the models file any more.
    """
    site = site_of(load_cluster(file.inputs.cluster), load_models(file.inputs.models))
    names = [tier.name for tier in file.plan.tiers]
    if file.inputs.max_tiers is not None:
        tiers = [site.tiers.index(name) for name in names if name in site.tiers]
        if len(tiers) < len(names) or tiers != sorted(set(tiers)):
            chosen, there = ", ".join(names), ", ".join(site.tiers)
            raise invalid("tiers", f"the plan has {chosen}; the models file has {there}, not all of them in that order")
        site = site.only(tiers)
    return with_planned_drafters(site, [tier.speculation for tier in file.plan.tiers])


def deployment_of(plan: CascadePlan) -> Deployment:
    """What a plan deploys."""
    tiers = (DeployedTier(tier.replicas, tier.threshold, **rules_of(tier)) for tier in plan.tiers)
    return Deployment(tuple(tiers), plan.dispatch, **rules_of(plan))


def shapes_of(deployment: Deployment) -> Shapes:
    """(shape, count) of the replicas of each tier."""
    return tuple(tuple((ReplicaShape.of(group), group.count) for group in tier.replicas) for tier in deployment.tiers)


def strategies_of(shapes: Sequence[Sequence[tuple[ReplicaShape, int]]], site: Site) -> tuple[Strategy, ...]:
    """Replicas (shape, count) of each tier, on a site. InvalidRequest where one does not fit."""
    result = []
    for tier, parts in enumerate(shapes):
        if (remote := site.remote_of(tier)) is not None:
            result.append(Strategy((), 0.0, remote))
            continue
        replicas = []
        for j, (shape, count) in enumerate(parts):
            replica, reason = site.replica(tier, shape, 1)
            if replica is None:
                raise invalid(f"deployment.tiers[{tier}].replicas[{j}]", reason)
            replicas.append((replica, count))
        result.append(Strategy(tuple(replicas), 0.0))
    return tuple(result)


def _rules(deployment: Deployment, demand: Demand, drawn: PlanOptions) -> AcceptanceRules:
    """What the routing has in addition to thresholds.

    Raises:
        InvalidRequest: A rule is out of bounds, is of the last tier, or lacks what it is about; names the field.
    """
    *lower, last = deployment.tiers
    if last.threshold is not None:
        raise invalid(f"deployment.tiers[{len(lower)}].threshold", "answers of the last tier are always accepted")
    check(tier_problems(deployment.tiers, demand.judged.tiers, "deployment.tiers"))
    columns: dict[str, Any] = {rule.field: tuple(rule.value(tier) for tier in lower) for rule in OF_TIERS}
    given = (rule for rule in OF_TIERS if any(value is not None for value in columns[rule.field]))
    check(problem for rule in given if (problem := rule.unfit(demand.judged, drawn)) is not None)
    return AcceptanceRules(**columns, **rules_of(deployment))
