"""Cascade plans and simulations as protobuf messages."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from penstock.client import plans
from penstock.client.messages.served_plan import (
    early_checks_from_proto,
    ladder_from_proto,
    long_answers_from_proto,
    long_answers_to_proto,
    trace_to_proto,
)
from penstock.client.messages.times import seconds
from penstock.proto.planner.v1 import planner_pb2

_GOALS = {
    "latency": planner_pb2.GOAL_LATENCY,
    "quality": planner_pb2.GOAL_QUALITY,
    "cost": planner_pb2.GOAL_COST,
    "rate": planner_pb2.GOAL_RATE,
}


_OBJECTIVES = {
    "largest-tier": planner_pb2.OBJECTIVE_LARGEST_TIER,
    "end-to-end": planner_pb2.OBJECTIVE_END_TO_END,
    "first-token": planner_pb2.OBJECTIVE_FIRST_TOKEN,
    "pace": planner_pb2.OBJECTIVE_PACE,
}


def planning_inputs_to_proto(inputs: plans.PlanningInputs) -> planner_pb2.PlanningInputs:
    """Raises:
    ValueError: cluster or cascade has a bad field, or lengths is neither quality nor trace.
    """
    sources = {"quality": planner_pb2.LENGTH_SOURCE_JUDGED, "trace": planner_pb2.LENGTH_SOURCE_TRACE}
    if inputs.lengths not in sources:
        raise ValueError(f"lengths: must be quality or trace, not '{inputs.lengths}'")
    tiers = [_cascade_tier(tier) for tier in inputs.cascade.get("tiers", ())]
    try:
        return planner_pb2.PlanningInputs(
            cluster=ParseDict(_name_or_spec(inputs.cluster, "gpu"), planner_pb2.Cluster()),
            cascade=ParseDict({**inputs.cascade, "tiers": tiers}, planner_pb2.Cascade()),
            workload=planner_pb2.Workload(
                trace=trace_to_proto(inputs.trace),
                judged=[_judged(prompt) for prompt in inputs.judged],
                requests=inputs.requests,
                seed=inputs.seed,
                lengths=sources[inputs.lengths],
                rate=inputs.rate,
                early_after_tokens=inputs.early_after_tokens,
            ),
        )
    except ParseError as error:
        raise ValueError(str(error)) from None


_DISPATCH = {
    "capacity": planner_pb2.DISPATCH_CAPACITY,
    "round-robin": planner_pb2.DISPATCH_ROUND_ROBIN,
    "pending-work": planner_pb2.DISPATCH_PENDING_WORK,
}


def plan_request(
    inputs: plans.PlanningInputs,
    min_quality: float | None,
    max_latency_s: float | None,
    objective: str,
    confidence: float | None,
    gpus: int | None,
    budget: str,
    goal: str | None = None,
    max_utilisation: float | None = None,
    skip: bool = False,
    burst_floor: float | None = None,
    burst_mean: float | None = None,
    max_tiers: int | None = None,
    min_tiers: int | None = None,
    early_error: float | None = None,
    percentile: float | None = None,
    long_answers: bool = False,
    best_answer: bool = False,
) -> planner_pb2.PlanCascadeRequest:
    """Raises:
    ValueError: There is no target, or the objective, the budget or the goal is unknown.
    """
    budgets = {"at-most": planner_pb2.GPU_BUDGET_AT_MOST, "exact": planner_pb2.GPU_BUDGET_EXACT}
    if budget not in budgets:
        raise ValueError(f"budget: must be {' or '.join(budgets)}, not '{budget}'")
    if objective not in _OBJECTIVES:
        raise ValueError(f"objective: must be {', '.join(_OBJECTIVES)}, not '{objective}'")
    if goal not in (None, *_GOALS):
        raise ValueError(f"goal: must be {', '.join(_GOALS)}, not '{goal}'")
    if min_quality is None and max_latency_s is None:
        raise ValueError("give min_quality, max_latency_s or both")
    return planner_pb2.PlanCascadeRequest(
        inputs=planning_inputs_to_proto(inputs),
        min_quality=min_quality,
        max_latency_s=max_latency_s,
        objective=_OBJECTIVES[objective],
        confidence=confidence,
        gpus=gpus,
        budget=budgets[budget],
        goal=planner_pb2.GOAL_UNSPECIFIED if goal is None else _GOALS[goal],
        max_utilisation=max_utilisation,
        skip=skip,
        burst_floor=burst_floor,
        burst_mean=burst_mean,
        max_tiers=max_tiers,
        min_tiers=min_tiers,
        early_error=early_error,
        percentile=percentile,
        long_answers=long_answers,
        best_answer=best_answer,
    )


def plan_event_from_proto(
    response: planner_pb2.PlanCascadeResponse,
) -> plans.PlanProgress | plans.CascadePlan | plans.Unreachable:
    if response.HasField("progress"):
        return plans.PlanProgress(response.progress.evaluations, seconds(response.progress.elapsed))
    if response.finished.HasField("unreachable"):
        unreachable = response.finished.unreachable
        return plans.Unreachable(unreachable.reason, unreachable.best, unreachable.binds)
    plan = response.finished.plan
    tiers = tuple(
        plans.PlannedTier(
            t.name,
            t.model,
            t.gpus,
            tuple(plans.ReplicaGroup(g.tp, g.pp, g.count, g.ep or 1, g.attn_dp or 1, g.gpu) for g in t.replicas),
            t.threshold if t.HasField("threshold") else None,
            t.used,
            t.share_processed,
            t.share_answered,
            t.latency_p95_s,
            t.utilisation,
            _planned_speculation(t.speculation) if t.HasField("speculation") else None,
            t.skip_below if t.HasField("skip_below") else None,
            t.remote_dollars_per_hour if t.HasField("remote_dollars_per_hour") else None,
            _planned_early(t.early) if t.HasField("early") else None,
            t.step_times,
            long_answers_from_proto(t),
        )
        for t in plan.tiers
    )
    return plans.CascadePlan(
        tiers,
        plan.quality,
        plan.latency_p95_s,
        plan.end_to_end_p95_s,
        plan.proof,
        plan.gap if plan.HasField("gap") else None,
        plan.binds,
        plan.evaluations,
        plan.simulations,
        seconds(plan.took),
        plan.workload_digest,
        plan.tested_quality if plan.HasField("tested_quality") else None,
        next((name for name, value in _GOALS.items() if value == plan.goal), "latency"),
        plan.breaks_at_rate_per_s if plan.HasField("breaks_at_rate_per_s") else None,
        plan.rate_per_s if plan.HasField("rate_per_s") else None,
        plan.dollars_per_hour if plan.HasField("dollars_per_hour") else None,
        ladder_from_proto(plan.burst) if plan.HasField("burst") else None,
        plan.burst_reason,
        _grading(plan.grading) if plan.HasField("grading") else None,
        _choice(plan.choice) if plan.HasField("choice") else None,
        plan.early_reason,
        next((name for name, value in _OBJECTIVES.items() if value == plan.objective), "largest-tier"),
        plan.percentile,
        plan.latency_s,
        _user_latency(plan.user_latency) if plan.HasField("user_latency") else None,
        plan.best_answer,
        cached_share=plan.cached_share,
    )


def simulate_request(
    inputs: plans.PlanningInputs,
    replicas: Sequence[Sequence[plans.ReplicaGroup]],
    thresholds: Sequence[float | None],
    skip_below: Sequence[float | None] = (),
    early_checks: Sequence[Sequence[plans.EarlyCheck]] = (),
    long_answers: Sequence[plans.LongAnswers | None] = (),
    dispatch: str = "capacity",
    best_answer: bool = False,
) -> planner_pb2.SimulateDeploymentRequest:
    """Raises:
    ValueError: thresholds, skip_below, early_checks or long_answers do not fit the number of tiers; the dispatch is unknown.
    """
    if dispatch not in _DISPATCH:
        raise ValueError(f"dispatch: must be {', '.join(_DISPATCH)}, not '{dispatch}'")
    by_tier = {"skip_below": skip_below, "early_checks": early_checks, "long_answers": long_answers}
    for name, given in (("thresholds", thresholds), *by_tier.items()):
        if len(given) != len(replicas) - 1 and (given or name == "thresholds"):
            raise ValueError(
                f"{name}: must have one entry for each tier but the last, {len(replicas) - 1}, not {len(given)}"
            )
    limits = skip_below or (None,) * len(thresholds)
    early = early_checks or ((),) * len(thresholds)
    long = long_answers or (None,) * len(thresholds)
    tiers = [
        planner_pb2.SimulatedTier(
            replicas=[planner_pb2.ReplicaGroup(**asdict(group)) for group in groups],
            threshold=threshold,
            skip_below=limit,
            early_checks=[planner_pb2.EarlyCheck(**asdict(check)) for check in checks],
            long_answers=long_answers_to_proto(rule),
        )
        for groups, threshold, limit, checks, rule in zip(
            replicas, (*thresholds, None), (*limits, None), (*early, ()), (*long, None), strict=True
        )
    ]
    return planner_pb2.SimulateDeploymentRequest(
        inputs=planning_inputs_to_proto(inputs), tiers=tiers, dispatch=_DISPATCH[dispatch], best_answer=best_answer
    )


def simulation_from_proto(response: planner_pb2.SimulateDeploymentResponse) -> plans.Simulation:
    tiers = tuple(
        plans.SimulatedTier(
            t.requests,
            _percentiles(t.time_to_first_token),
            _percentiles(t.time_per_output_token),
            _percentiles(t.latency),
            t.requests_per_s,
            t.output_tokens_per_s,
            t.utilisation,
            t.preemptions,
        )
        for t in response.tiers
    )
    felt = _user_latency(response.user_latency) if response.HasField("user_latency") else None
    counts = response.requests, felt, response.cached_share
    return plans.Simulation(tiers, _percentiles(response.end_to_end), response.quality, *counts)


def _cascade_tier(tier: Mapping[str, Any]) -> dict[str, Any]:
    """A tier of the models file as the message has it."""
    fields = _name_or_spec(tier, "model")
    if "speculation" in fields:
        speculation = dict(fields["speculation"])
        drafters = [_name_or_spec(drafter, "model") for drafter in speculation.get("drafters", ())]
        fields["speculation"] = speculation | {"drafters": drafters}
    return fields


def _name_or_spec(part: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Replace `key` by `{key}_name` for a name of the catalogue, or by `{key}_spec` for a specification."""
    fields = dict(part)
    if key in fields:
        value = fields.pop(key)
        fields[f"{key}_name" if isinstance(value, str) else f"{key}_spec"] = value
    return fields


def _judged(prompt: plans.JudgedPrompt) -> planner_pb2.JudgedPrompt:
    return planner_pb2.JudgedPrompt(
        input_tokens=prompt.input_tokens,
        output_tokens=prompt.output_tokens,
        judge_scores=prompt.judge_scores,
        predicted_scores=prompt.predicted_scores,
        unfinished=[planner_pb2.UnfinishedScores(scores=scores) for scores in prompt.unfinished_scores],
        qualities=prompt.qualities,
        refused=prompt.refused,
    )


def _planned_early(early: planner_pb2.PlannedEarlyChecks) -> plans.PlannedEarlyChecks:
    return plans.PlannedEarlyChecks(
        early_checks_from_proto(early.checks),
        early.meanwhile_tokens,
        early.rejected_share if early.HasField("rejected_share") else None,
        early.error if early.HasField("error") else None,
        early.saved_share,
        early.scored_per_answer,
    )


def _choice(choice: planner_pb2.CascadeChoice) -> plans.CascadeChoice:
    other = choice.runner_up
    return plans.CascadeChoice(
        tuple(choice.candidates),
        choice.considered_count,
        choice.planned_count,
        {one.reason: one.count for one in choice.left_out},
        plans.RunnerUp(
            tuple(other.tiers),
            other.quality,
            other.latency_p95_s,
            other.gpus,
            other.dollars_per_hour if other.HasField("dollars_per_hour") else None,
            other.rate_per_s if other.HasField("rate_per_s") else None,
        )
        if choice.HasField("runner_up")
        else None,
    )


def _user_latency(felt: planner_pb2.UserLatency) -> plans.UserLatency:
    return plans.UserLatency(_percentiles(felt.end_to_end), _percentiles(felt.first_token), _percentiles(felt.pace))


def _percentiles(p: planner_pb2.Percentiles) -> plans.Percentiles:
    return plans.Percentiles(p.p50, p.p95, p.p99, p.mean)


def _grading(grading: planner_pb2.Grading) -> plans.Grading:
    rate = grading.requests_per_s if grading.HasField("requests_per_s") else None
    return plans.Grading(grading.requests, rate, _percentiles(grading.wait))


def _planned_speculation(speculation: planner_pb2.PlannedSpeculation) -> plans.PlannedSpeculation:
    return plans.PlannedSpeculation(
        tuple(
            plans.PlannedDrafter(d.model, d.acceptance, d.weight_bytes, d.kv_bytes_per_token)
            for d in speculation.drafters
        ),
        speculation.max_window,
        tuple(
            plans.ReplicaDrafts(
                r.tp,
                r.pp,
                r.gpu,
                r.memory_bytes,
                tuple(plans.DraftChoice(c.replies, tuple(c.chain), c.window) for c in r.choices),
            )
            for r in speculation.replicas
        ),
    )
