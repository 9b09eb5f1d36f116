"""The plan that PlanCascade returns."""

import dataclasses

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.burst_codec import ladder_to_proto
from planner_service.cascade_plan import CascadeChoice, CascadePlan
from planner_service.demand import workload_digest
from planner_service.early_rules import EarlyOutcome
from planner_service.planned_drafts import PlannedSpeculation, planned_speculation
from planner_service.planning_codec.enums import GOALS, OBJECTIVES
from planner_service.planning_codec.report import percentiles_to_proto, report_to_proto, user_latency_to_proto
from planner_service.proto_codec import early_checks_to_proto, long_answers_to_proto
from planner_service.simulator import Dispatch
from planner_service.site import Demand, Site
from planner_service.step_times import step_times
from services.proto_codec import duration


def plan_to_proto(plan: CascadePlan, site: Site, demand: Demand, took_s: float) -> pb.CascadePlan:
    """site: that the plan is for; it says what drafts."""
    limits = (*plan.skip_below, None) if plan.skip_below else (None,) * len(plan.tiers)
    early = (*plan.early, None) if plan.early else (None,) * len(plan.tiers)
    long_answers = (*plan.long_answers, None) if plan.long_answers else (None,) * len(plan.tiers)
    created = pb.CascadePlan(
        tiers=[
            pb.PlannedTier(
                name=tier.name,
                model=tier.model,
                gpus=tier.gpus,
                replicas=[
                    pb.ReplicaGroup(**dataclasses.asdict(replica.shape), count=count)
                    for replica, count in tier.strategy.replicas
                ],
                threshold=threshold if threshold is not None and threshold <= 100 else None,
                used=tier.strategy.used,
                share_processed=tier.share_processed,
                share_answered=tier.share_answered,
                latency_p95_s=tier.p95_s,
                report=report_to_proto(tier.report),
                utilisation=utilisation,
                speculation=_speculation_to_proto(planned_speculation(site, i, tier.strategy.replicas)),
                skip_below=limit,
                remote_dollars_per_hour=None if tier.strategy.remote is None else tier.strategy.remote_dollars_per_hour,
                early=None if outcome is None else _early_to_proto(outcome),
                step_times=step_times(site, i, ()).source,
                long_answers=long_answers_to_proto(long),
            )
            for i, (tier, threshold, utilisation, limit, outcome, long) in enumerate(
                zip(plan.tiers, (*plan.thresholds, None), plan.utilisation, limits, early, long_answers, strict=True)
            )
        ],
        quality=plan.quality,
        latency_p95_s=plan.latency_p95_s,
        end_to_end_p95_s=plan.end_to_end_p95_s,
        proof=plan.solution.proof.value,
        gap=plan.solution.gap,
        binds=plan.binds,
        evaluations=plan.solution.evaluations,
        simulations=plan.simulations,
        took=duration(took_s),
        workload_digest=workload_digest(demand),
        gpu_step=plan.gpu_step,
        rate_per_s=plan.rate_per_s,
        dollars_per_hour=plan.dollars_per_hour,
        dispatch=pb.DISPATCH_CAPACITY if plan.dispatch is Dispatch.CAPACITY else pb.DISPATCH_ROUND_ROBIN,
        burst=None if plan.burst is None else ladder_to_proto(plan.burst),
        burst_reason=plan.burst_reason,
        early_reason=plan.early_reason,
        best_answer=plan.best_answer,
        choice=None if plan.choice is None else _choice_to_proto(plan.choice),
        objective=next(value for value, objective in OBJECTIVES.items() if value and objective is plan.objective),
        percentile=plan.percentile,
        latency_s=plan.felt_s,
        user_latency=user_latency_to_proto(plan.felt),
        cached_share=plan.cached_share,
    )
    created.goal = next(value for value, goal in GOALS.items() if goal is plan.goal)
    if plan.load is not None:
        created.breaks_at_rate_per_s = plan.load.sustained_per_s
    if plan.grading is not None:
        created.grading.CopyFrom(
            pb.Grading(
                requests=plan.grading.requests,
                requests_per_s=plan.grading.per_s,
                wait=percentiles_to_proto(plan.grading.wait),
            )
        )
    if plan.promise is not None:
        created.tested_quality = plan.promise.tested_quality
    return created


def _early_to_proto(outcome: EarlyOutcome) -> pb.PlannedEarlyChecks | None:
    if not outcome.rule.checks:
        return None
    return pb.PlannedEarlyChecks(
        checks=early_checks_to_proto(outcome.rule.checks),
        meanwhile_tokens=outcome.rule.meanwhile_tokens,
        rejected_share=outcome.rejected,
        error=outcome.error,
        saved_share=outcome.saved,
        scored_per_answer=outcome.scored,
    )


def _choice_to_proto(choice: CascadeChoice) -> pb.CascadeChoice:
    other = choice.runner_up
    return pb.CascadeChoice(
        candidates=choice.candidates,
        considered_count=choice.considered,
        planned_count=choice.planned,
        left_out=[pb.LeftOutCascades(reason=why.value, count=count) for why, count in choice.left_out.items()],
        runner_up=None
        if other is None
        else pb.RunnerUp(
            tiers=other.tiers,
            quality=other.quality,
            latency_p95_s=other.latency_s,
            gpus=other.gpus,
            dollars_per_hour=other.dollars_per_hour,
            rate_per_s=other.rate_per_s,
        ),
    )


def _speculation_to_proto(speculation: PlannedSpeculation | None) -> pb.PlannedSpeculation | None:
    if speculation is None:
        return None
    return pb.PlannedSpeculation(
        drafters=[
            pb.PlannedDrafter(
                model=model.name,
                acceptance=model.acceptance,
                weight_bytes=model.weight_bytes,
                kv_bytes_per_token=model.kv_bytes_per_token,
            )
            for model in speculation.models
        ],
        max_window=speculation.max_window,
        replicas=[
            pb.ReplicaDrafts(
                tp=drafts.shape.tp,
                pp=drafts.shape.pp,
                gpu=drafts.shape.gpu,
                memory_bytes=drafts.memory_bytes,
                choices=[
                    pb.DraftChoice(replies=choice.replies, chain=choice.chain, window=choice.window)
                    for choice in drafts.choices
                ],
            )
            for drafts in speculation.replicas
        ],
    )
