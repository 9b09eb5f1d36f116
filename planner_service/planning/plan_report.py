"""A plan as it is reported, from what it was found with. No I/O."""

from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.planning.verdict import verdict
from penstock.planner_service.question.demand import workload_digest
from penstock.planner_service.question.planned_drafts import planned_speculation
from penstock.planner_service.question.planning_options import Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.question.step_times import step_times
from penstock.planner_service.routing.solution import Proof
from penstock.planner_service.simulator.felt import latency_words
from penstock.services.acceptance.pipeline import of_tier
from penstock.types import planned as types
from penstock.types.rules import rules_of


def plan_report(
    plan: CascadePlan,
    site: Site,
    demand: Demand,
    options: Options,
    took_s: float,
    step: types.NextStep | None,
    band: types.LatencyBand | None,
) -> types.CascadePlan:
    """site, demand: of the tiers that the plan has. step: where it was computed. band: of estimated step times."""
    load, solution, words = plan.load, plan.solution, latency_words(plan.objective, plan.percentile)
    latencies, of_run = (s / plan.stay_s if plan.stay_s > 0 else None for s in (plan.seconds, plan.runs_s))
    return types.CascadePlan(
        tuple(_tier(plan, site, i) for i in range(len(plan.tiers))),
        plan.quality,
        plan.latency_p95_s,
        plan.end_to_end_p95_s,
        plan.objective,
        plan.goal,
        plan.dispatch,
        target_words(options),
        workload_digest(demand),
        types.PlannedLatency(plan.objective, plan.percentile, plan.felt_s, words, plan.felt_interval, band),
        plan.felt,
        plan.latency_interval,
        plan.end_to_end_interval,
        types.Horizon(plan.requests, plan.seconds, latencies, of_run or None),
        types.Cost(plan.gpus, plan.dollars_per_hour),
        plan.promise,
        types.Optimality(
            solution.proof is not Proof.SEARCHED, _over(plan), solution.proof.value, solution.gap, plan.gpu_step
        ),
        None if load is None else types.PlanLoad(load.offered_per_s, load.sustained_per_s, load.overloaded, load.tier),
        plan.grading,
        plan.choice,
        types.AloneQualities(demand.judged.worst, demand.judged.best, demand.judged.under(plan.rules).most),
        plan.infeasible,
        plan.binds,
        ", ".join(f"{each.gpus} x {each.name or each.gpu.name}" for each in site.types),
        plan.rate_per_s,
        None if load is None else load.sustained_per_s,
        plan.cached_share,
        solution.evaluations,
        plan.simulations,
        took_s,
        True,
        verdict(site, plan, step),
        step,
        plan.largest_alone,
        **rules_of(plan.rules),
    )


def target_words(options: Options) -> str:
    """`quality >= 85, p95 end-to-end latency <= 2`."""
    targets = []
    if options.min_quality is not None:
        targets.append(f"quality >= {options.min_quality:g}")
    if options.max_latency_s is not None:
        targets.append(f"{options.latency_words} <= {options.max_latency_s:g}")
    return ", ".join(targets)


def _tier(plan: CascadePlan, site: Site, i: int) -> types.PlannedTier:
    tier = plan.tiers[i]
    replicas, report = tier.strategy.replicas, tier.report
    threshold = plan.thresholds[i] if i < len(plan.thresholds) else None
    return types.PlannedTier(
        tier.name,
        tier.model,
        tier.gpus,
        tuple(replica.shape.times(count) for replica, count in replicas),
        None if threshold is None or threshold > 100 else threshold,
        None if tier.strategy.remote is None else types.RemoteCost(tier.strategy.remote_dollars_per_hour),
        planned_speculation(site, i, replicas),
        tier.share_processed,
        tier.share_answered,
        tier.p95_s,
        step_times(site, i, (replica.shape for replica, _ in replicas)),
        report.requests,
        report.ttft_s,
        report.tpot_s,
        report.latency_s,
        report.requests_per_s,
        report.output_tokens_per_s,
        report.preemptions,
        report.utilisation,
        plan.utilisation[i],
        **of_tier(plan.rules, i),
    )


def _over(plan: CascadePlan) -> str:
    """What a proof is about."""
    searched = "routings at the judged scores, and the replica mixes that are searched"
    return searched if plan.choice is None else f"all {plan.choice.cascades} cascades of the candidates, {searched}"
