"""Converts between the clients' types and protobuf messages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import ParseDict, ParseError

from penstock.client import chat, mesh_status, plans, types
from penstock.proto.common.v1 import common_pb2
from penstock.proto.planner.v1 import planner_pb2
from penstock.proto.router.v1 import router_pb2 as pb

_REASONS = {
    common_pb2.FINISH_REASON_STOP: types.FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: types.FinishReason.LENGTH,
    common_pb2.FINISH_REASON_DECLINED: types.FinishReason.DECLINED,
}
_SLO_CLASSES = {
    common_pb2.SLO_CLASS_STANDARD: "standard",
    common_pb2.SLO_CLASS_BEST_EFFORT: "best_effort",
}
_SLO_FALLBACKS = {
    None: common_pb2.SLO_FALLBACK_UNSPECIFIED,
    "best_effort": common_pb2.SLO_FALLBACK_BEST_EFFORT,
    "decline": common_pb2.SLO_FALLBACK_DECLINE,
}
_STATES = {
    pb.INSTANCE_STATE_READY: "ready",
    pb.INSTANCE_STATE_DRAINING: "draining",
    pb.INSTANCE_STATE_EJECTED: "ejected",
}
_POLICIES = {
    planner_pb2.JUDGE_UNAVAILABLE_POLICY_ESCALATE: "escalate",
    planner_pb2.JUDGE_UNAVAILABLE_POLICY_ACCEPT: "accept",
}


def request_to_proto(prompt: types.Prompt, options: types.Options) -> pb.GenerateRequest:
    sampling = common_pb2.SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        max_output_tokens=options.max_tokens,
        stop=options.stop,
        top_logprobs_count=options.top_logprobs,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=options.logit_bias,
        min_p=options.min_p,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
    )
    if options.structured_output is not None:
        sampling.structured_output.CopyFrom(chat.structured_output_to_proto(options.structured_output))
    request = pb.GenerateRequest(
        model=options.model,
        prompt=chat.prompt_to_proto(prompt, options),
        sampling=sampling,
        priority=options.priority,
        request_id=options.request_id,
        prediction=options.prediction,
    )
    if options.slo is not None:
        request.slo.CopyFrom(slo_to_proto(options.slo))
    return request


def slo_to_proto(slo: types.Slo) -> common_pb2.Slo:
    """Raises:
    ValueError: The fallback is unknown, or there are phases and a pace for the whole answer.
    """
    if slo.fallback not in _SLO_FALLBACKS:
        raise ValueError(f"slo.fallback: must be best_effort or decline, not '{slo.fallback}'")
    if slo.phases and slo.time_per_output_token_s is not None:
        raise ValueError("slo.phases: must not be combined with time_per_output_token_s")
    message = common_pb2.Slo(name=slo.name, fallback=_SLO_FALLBACKS[slo.fallback])
    if slo.time_to_first_token_s is not None:
        message.time_to_first_token.CopyFrom(duration(slo.time_to_first_token_s))
    phases = slo.phases
    if slo.time_per_output_token_s is not None:
        phases = (types.SloPhase(0, slo.time_per_output_token_s),)
    for phase in phases:
        message.phases.add(
            from_output_token_count=phase.from_output_token,
            time_per_output_token=duration(phase.time_per_output_token_s),
            after_marker=phase.after_marker,
        )
    return message


def _slo_result(slo: pb.SloResult) -> types.SloResult:
    late_s = seconds(slo.first_token_late) if slo.HasField("first_token_late") else None
    return types.SloResult(
        _SLO_CLASSES.get(slo.slo_class), slo.attained, late_s, slo.window_count, slo.late_window_count
    )


def event_from_proto(response: pb.GenerateResponse) -> types.Event | None:
    """The event; None for a heartbeat, and for an event that is unknown to this version."""
    kind = response.WhichOneof("event")
    event: Any = getattr(response, kind) if kind is not None else None
    match kind:
        case "tokens":
            frame = event.frame
            logprobs = tuple(
                types.PositionLogprobs(_logprob(p.chosen), tuple(_logprob(t) for t in p.top)) for p in frame.logprobs
            )
            return types.Tokens(event.tier, frame.offset, tuple(frame.token_ids), frame.text, logprobs)
        case "accepted":
            step = event.burst_step if event.HasField("burst_step") else None
            return types.Accepted(event.request_id, event.plan_revision, event.seed, step)
        case "tier_started":
            return types.TierStarted(event.tier, event.instance_id)
        case "tier_admitted":
            return types.TierAdmitted(event.tier, event.instance_id, event.slo_kept, _SLO_CLASSES.get(event.slo_class))
        case "tier_declined":
            return types.TierDeclined(event.tier, event.instance_id, event.reason)
        case "judged":
            score = event.score if event.HasField("score") else None
            return types.Judged(
                event.tier, score, event.threshold, event.accepted, event.scorer, event.reason, event.flagged
            )
        case "escalated":
            reason = pb.EscalationReason.Name(event.reason).removeprefix("ESCALATION_REASON_").lower()
            predicted = event.predicted_score if event.HasField("predicted_score") else None
            return types.Escalated(event.from_tier, event.to_tier, reason, predicted)
        case "instance_changed":
            return types.InstanceChanged(
                event.tier, event.from_instance_id, event.to_instance_id, event.offset, event.reason
            )
        case "finished":
            return types.Finished(
                reason=_REASONS.get(event.reason, types.FinishReason.ABORTED),
                tier=event.tier,
                usage=_usage(event.usage),
                tiers=tuple(_summary(t) for t in event.tiers),
                ttft_s=seconds(event.time_to_first_token) if event.HasField("time_to_first_token") else None,
                total_s=seconds(event.total_time),
                trace_id=event.trace_id,
                tool_calls=chat.calls_from_proto(event.tool_calls),
                content=event.content if event.HasField("content") else None,
                slo=_slo_result(event.slo) if event.HasField("slo") else None,
            )
        case _:
            return None


def heartbeat_interval_s(response: pb.GenerateResponse) -> float | None:
    """The router's longest time between two messages of a stream, if the response announces it."""
    match response.WhichOneof("event"):
        case "heartbeat" if response.heartbeat.HasField("interval"):
            return seconds(response.heartbeat.interval)
        case "accepted" if response.accepted.HasField("heartbeat_interval"):
            return seconds(response.accepted.heartbeat_interval)
        case _:
            return None


def model_from_proto(model: pb.Model) -> types.Model:
    return types.Model(model.id, model.model, model.cascade, model.max_context_tokens)


def status_from_proto(status: pb.MeshStatus) -> mesh_status.MeshStatus:
    router = status.router
    return mesh_status.MeshStatus(
        router_id=status.router_id,
        plan_revision=status.plan_revision,
        connected=status.state_connected,
        state_age_s=seconds(status.state_age),
        tiers=tuple(
            mesh_status.TierStatus(
                name=t.name,
                model=t.model,
                threshold=t.threshold if t.HasField("threshold") else None,
                planned_instances=t.planned_instance_count,
                live_instances=t.live_instance_count,
                running=t.running_count,
                queued=t.queued_count,
                output_tokens_per_s=t.output_tokens_per_second,
                answered=t.answered_count,
                escalated=t.escalated_count,
                accepted_draft_tokens=t.accepted_draft_token_count,
                rejected_draft_tokens=t.rejected_draft_token_count,
            )
            for t in status.tiers
        ),
        instances=tuple(
            mesh_status.InstanceStatus(
                instance_id=i.instance_id,
                role=i.role,
                tier=i.tier,
                address=i.address,
                engine=i.engine,
                state=_STATES.get(i.state, "unknown"),
                running=i.running_count,
                queued=i.queued_count,
                free_kv_blocks=i.free_kv_blocks,
                kv_blocks=i.kv_blocks,
                output_tokens_per_s=i.output_tokens_per_second,
                age_s=seconds(i.age),
                place=mesh_status.StagePlace(i.place.stage, i.place.from_tokens, i.place.to_tokens)
                if i.HasField("place")
                else None,
                admin_address=i.admin_address,
                processes=i.process_count or 1,  # 0: of a router that knows no such field
                drafting=_drafting_from_proto(i.drafting) if i.HasField("drafting") else None,
            )
            for i in status.instances
        ),
        active=router.active_count,
        waiting=router.waiting_count,
        finished=router.finished_count,
        failed=router.failed_count,
        rejected=router.rejected_count,
        failovers=router.failover_count,
        migrations=router.migration_count,
        advice_unmet=router.advice_unmet_count,
        requests_per_s=router.requests_per_second,
        ttft_p50_s=seconds(router.time_to_first_token_p50),
        ttft_p95_s=seconds(router.time_to_first_token_p95),
        processes=tuple(
            mesh_status.RouterProcessStatus(
                index=p.index,
                instance_id=p.instance_id,
                answering=p.answering,
                active=p.active_count,
                waiting=p.waiting_count,
                finished=p.finished_count,
            )
            for p in status.processes
        ),
        slo=mesh_status.SloCounts(
            attained=router.slo.attained_count,
            broken=router.slo.broken_count,
            best_effort=router.slo.best_effort_count,
            declined=router.slo.declined_count,
        ),
        burst=_burst_from_proto(router.burst) if router.HasField("burst") else None,
    )


def _burst_from_proto(burst: pb.BurstStatus) -> mesh_status.BurstStatus:
    return mesh_status.BurstStatus(
        step=burst.step,
        steps=burst.step_count,
        mean_quality=burst.mean_quality,
        window_quality=burst.window_quality if burst.HasField("window_quality") else None,
        budget_left=burst.budget_left_share,
        out_of_budget=burst.out_of_budget,
        arrivals_per_s=burst.arrivals_per_second,
        changes=burst.change_count,
        last_changes=tuple(
            mesh_status.BurstChange(
                change.at.ToNanoseconds() / 1e9,
                change.from_step,
                change.to_step,
                pb.BurstReason.Name(change.reason).removeprefix("BURST_REASON_").lower()
                if change.reason in pb.BurstReason.values()
                else "unknown",
            )
            for change in burst.changes
        ),
    )


def _drafting_from_proto(drafting: pb.Drafting) -> mesh_status.Drafting:
    share = drafting.accepted_share if drafting.HasField("accepted_share") else None
    return mesh_status.Drafting(tuple(drafting.chain), drafting.window_tokens, share)


def move_from_proto(response: pb.MoveReplyResponse) -> mesh_status.Move:
    if response.HasField("refusal"):
        return mesh_status.Move(response.refusal)
    return mesh_status.Move(None, response.moved.offset, seconds(response.moved.stall), response.moved.sent_bytes)


def trace_from_proto(trace: pb.Trace) -> mesh_status.Trace:
    return mesh_status.Trace(
        trace.trace_id,
        tuple(
            mesh_status.Span(
                span_id=s.span_id,
                parent_span_id=s.parent_span_id,
                name=s.name,
                service=s.service,
                start_s=s.start_time.ToNanoseconds() / 1e9,
                duration_s=seconds(s.duration),
                failed=s.failed,
                status_message=s.status_message,
                attributes={a.key: a.value for a in s.attributes},
                events=tuple((e.name, seconds(e.after)) for e in s.events),
            )
            for s in trace.spans
        ),
    )


_QOE = tuple(field.name for field in planner_pb2.QoeModel.DESCRIPTOR.fields)  # D0 to D4


def plan_from_proto(plan: planner_pb2.Plan) -> plans.Plan:
    return plans.Plan(
        tiers=tuple(
            plans.TierPlan(
                t.name,
                t.model,
                t.threshold if t.HasField("threshold") else None,
                t.instance_count,
                _stages_from_proto(t.stages),
                tuple(getattr(t.qoe, name) for name in _QOE) if t.HasField("qoe") else (),
                t.skip_below if t.HasField("skip_below") else None,
                tuple(plans.EarlyCheck(c.after_tokens, c.reject_below) for c in t.early_checks),
            )
            for t in plan.tiers
        ),
        scorer=plan.scorer,
        judge_unavailable=_POLICIES.get(plan.judge_unavailable, "escalate"),
        revision=plan.revision,
        source=plan.provenance.source,
        note=plan.provenance.note,
        created_at=plan.provenance.created_at.ToNanoseconds() / 1e9,
        prediction=_prediction(plan.provenance.prediction) if plan.provenance.HasField("prediction") else None,
        burst=_ladder(plan.burst) if plan.HasField("burst") else None,
    )


def _ladder(ladder: planner_pb2.BurstLadder) -> plans.BurstLadder:
    return plans.BurstLadder(
        ladder.mean_quality,
        tuple(
            plans.BurstStep(
                tuple(
                    plans.BurstThreshold(rule.score, rule.tie_share if rule.HasField("tie_share") else 1.0)
                    for rule in step.thresholds
                ),
                step.quality,
                step.rate_per_s,
                step.tier,
                step.tier_share,
            )
            for step in ladder.steps
        ),
    )


def _ladder_to_proto(ladder: plans.BurstLadder) -> planner_pb2.BurstLadder:
    return planner_pb2.BurstLadder(
        mean_quality=ladder.mean_quality,
        steps=[
            planner_pb2.BurstStep(
                thresholds=[planner_pb2.BurstThreshold(**asdict(rule)) for rule in step.thresholds],
                quality=step.quality,
                rate_per_s=step.rate_per_s,
                tier=step.tier,
                tier_share=step.tier_share,
            )
            for step in ladder.steps
        ],
    )


def served_request_from_proto(request: pb.ServedRequest) -> mesh_status.ServedRequest:
    return mesh_status.ServedRequest(
        request.arrival_seconds, request.prompt_token_count, request.output_token_count, request.tier
    )


def usage_from_proto(entry: pb.TenantUsage) -> mesh_status.TenantUsage:
    return mesh_status.TenantUsage(
        entry.tenant,
        entry.key_id,
        entry.tier,
        entry.request_count,
        entry.prompt_token_count,
        entry.output_token_count,
        entry.tier_seconds,
        entry.cost,
        entry.compute_seconds,
    )


def plan_to_proto(plan: plans.Plan) -> planner_pb2.Plan:
    """Raises:
    ValueError: The policy is neither escalate nor accept.
    """
    policies = {name: value for value, name in _POLICIES.items()}
    if plan.judge_unavailable not in policies:
        raise ValueError(f"judge_unavailable: must be escalate or accept, not '{plan.judge_unavailable}'")
    return planner_pb2.Plan(
        tiers=[
            planner_pb2.TierPlan(
                name=t.name,
                model=t.model,
                threshold=t.threshold,
                instance_count=t.instances,
                stages=map(_stage_to_proto, t.stages),
                qoe=planner_pb2.QoeModel(**dict(zip(_QOE, t.qoe, strict=True))) if t.qoe else None,
                skip_below=t.skip_below,
                early_checks=[
                    planner_pb2.EarlyCheck(after_tokens=c.after_tokens, reject_below=c.reject_below)
                    for c in t.early_checks
                ],
            )
            for t in plan.tiers
        ],
        scorer=plan.scorer,
        judge_unavailable=policies[plan.judge_unavailable],
        provenance=planner_pb2.Provenance(
            source=plan.source,
            note=plan.note,
            prediction=planner_pb2.Prediction(**asdict(plan.prediction)) if plan.prediction is not None else None,
        ),
        burst=None if plan.burst is None else _ladder_to_proto(plan.burst),
    )


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
                trace=_trace_to_proto(inputs.trace),
                judged=[planner_pb2.JudgedPrompt(**asdict(prompt)) for prompt in inputs.judged],
                requests=inputs.requests,
                seed=inputs.seed,
                lengths=sources[inputs.lengths],
                rate=inputs.rate,
            ),
        )
    except ParseError as error:
        raise ValueError(str(error)) from None


_GOALS = {
    "latency": planner_pb2.GOAL_LATENCY,
    "quality": planner_pb2.GOAL_QUALITY,
    "cost": planner_pb2.GOAL_COST,
    "rate": planner_pb2.GOAL_RATE,
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
) -> planner_pb2.PlanCascadeRequest:
    """Raises:
    ValueError: There is no target, or the objective, the budget or the goal is unknown.
    """
    objectives = {
        "largest-tier": planner_pb2.OBJECTIVE_LARGEST_TIER,
        "end-to-end": planner_pb2.OBJECTIVE_END_TO_END,
    }
    budgets = {"at-most": planner_pb2.GPU_BUDGET_AT_MOST, "exact": planner_pb2.GPU_BUDGET_EXACT}
    if budget not in budgets:
        raise ValueError(f"budget: must be {' or '.join(budgets)}, not '{budget}'")
    if objective not in objectives:
        raise ValueError(f"objective: must be {' or '.join(objectives)}, not '{objective}'")
    if goal not in (None, *_GOALS):
        raise ValueError(f"goal: must be {', '.join(_GOALS)}, not '{goal}'")
    if min_quality is None and max_latency_s is None:
        raise ValueError("give min_quality, max_latency_s or both")
    return planner_pb2.PlanCascadeRequest(
        inputs=planning_inputs_to_proto(inputs),
        min_quality=min_quality,
        max_latency_s=max_latency_s,
        objective=objectives[objective],
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
    )


def plan_event_from_proto(
    response: planner_pb2.PlanCascadeResponse,
) -> plans.PlanProgress | plans.CascadePlan | plans.Unreachable:
    if response.HasField("progress"):
        return plans.PlanProgress(response.progress.evaluations, seconds(response.progress.elapsed))
    if response.finished.HasField("unreachable"):
        return plans.Unreachable(response.finished.unreachable.reason, response.finished.unreachable.best)
    plan = response.finished.plan
    tiers = tuple(
        plans.PlannedTier(
            t.name,
            t.model,
            t.gpus,
            tuple(plans.ReplicaGroup(g.tp, g.pp, g.count) for g in t.replicas),
            t.threshold if t.HasField("threshold") else None,
            t.used,
            t.share_processed,
            t.share_answered,
            t.latency_p95_s,
            t.utilisation,
            _planned_speculation(t.speculation) if t.HasField("speculation") else None,
            t.skip_below if t.HasField("skip_below") else None,
            t.remote_dollars_per_hour if t.HasField("remote_dollars_per_hour") else None,
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
        _ladder(plan.burst) if plan.HasField("burst") else None,
        plan.burst_reason,
        _grading(plan.grading) if plan.HasField("grading") else None,
        _choice(plan.choice) if plan.HasField("choice") else None,
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


def simulate_request(
    inputs: plans.PlanningInputs,
    replicas: Sequence[Sequence[plans.ReplicaGroup]],
    thresholds: Sequence[float | None],
    skip_below: Sequence[float | None] = (),
) -> planner_pb2.SimulateDeploymentRequest:
    """Raises:
    ValueError: thresholds or skip_below do not fit the number of tiers.
    """
    limits = skip_below or (None,) * len(thresholds)
    tiers = [
        planner_pb2.SimulatedTier(
            replicas=[planner_pb2.ReplicaGroup(**asdict(group)) for group in groups],
            threshold=threshold,
            skip_below=limit,
        )
        for groups, threshold, limit in zip(replicas, (*thresholds, None), (*limits, None), strict=True)
    ]
    return planner_pb2.SimulateDeploymentRequest(inputs=planning_inputs_to_proto(inputs), tiers=tiers)


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
    return plans.Simulation(tiers, _percentiles(response.end_to_end), response.quality, response.requests)


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


def _prediction(prediction: planner_pb2.Prediction) -> plans.Prediction:
    return plans.Prediction(
        prediction.objective,
        prediction.target,
        prediction.workload_digest,
        prediction.quality,
        prediction.latency_p95_s,
        prediction.end_to_end_p95_s,
    )


def stages_request(
    tier: str,
    instances: int | None,
    qoe: Sequence[float],
    sequences: Iterable[plans.SequenceInFlight],
    kv_bytes_per_token: float,
    bandwidth_bytes_per_s: float,
    max_tokens: int | None,
    publish: bool,
) -> planner_pb2.PlanStagesRequest:
    """Raises:
    ValueError: The QoE model does not have five coefficients.
    """
    if qoe and len(qoe) != len(_QOE):
        raise ValueError(f"qoe: must be D0 to D4, not {len(qoe)} numbers")
    return planner_pb2.PlanStagesRequest(
        tier=tier,
        instance_count=instances,
        qoe=planner_pb2.QoeModel(**dict(zip(_QOE, qoe, strict=True))) if qoe else None,
        sequences=[
            planner_pb2.SequenceInFlight(input_tokens=s.input_tokens, tokens=s.tokens, output_tokens=s.output_tokens)
            for s in sequences
        ],
        kv_bytes_per_token=kv_bytes_per_token,
        bandwidth_bytes_per_second=bandwidth_bytes_per_s,
        max_tokens=max_tokens,
        publish=publish,
    )


def add_replay(
    request: planner_pb2.PlanStagesRequest,
    trace: Sequence[tuple[float, int, int]],
    replica: Mapping[str, Any] | None,
    against: Sequence[plans.Stage],
) -> None:
    """Add to a request what is replayed.

    Raises:
        ValueError: replica has a bad field.
    """
    if trace:
        request.trace.CopyFrom(_trace_to_proto(trace))
    if replica is not None:
        try:
            ParseDict(dict(replica), request.replica)
        except ParseError as error:
            raise ValueError(f"replica: {error}") from None
    request.against.extend(_stage_to_proto(stage) for stage in against)


def _trace_to_proto(trace: Sequence[tuple[float, int, int]]) -> planner_pb2.Trace:
    arrivals, inputs, outputs = tuple(zip(*trace, strict=True)) or ((), (), ())
    return planner_pb2.Trace(arrival_s=arrivals, input_tokens=inputs, output_tokens=outputs)


def _stage_to_proto(stage: plans.Stage) -> planner_pb2.Stage:
    return planner_pb2.Stage(from_tokens=stage.from_tokens, to_tokens=stage.to_tokens, instance_count=stage.instances)


def _stages_from_proto(stages: Iterable[planner_pb2.Stage]) -> tuple[plans.Stage, ...]:
    return tuple(plans.Stage(s.from_tokens, s.to_tokens, s.instance_count) for s in stages)


def stage_layout_from_proto(response: planner_pb2.PlanStagesResponse) -> plans.StageLayout:
    return plans.StageLayout(
        _stages_from_proto(response.stages),
        response.quality,
        response.one_stage_quality,
        response.chain_quality if response.HasField("chain_quality") else None,
        response.method,
        response.gap if response.HasField("gap") else None,
        response.elapsed_seconds,
        plan_from_proto(response.plan) if response.HasField("plan") else None,
        _verdict_from_proto(response.verdict) if response.HasField("verdict") else None,
    )


def _verdict_from_proto(verdict: planner_pb2.StagesVerdict) -> plans.StagesVerdict:
    return plans.StagesVerdict(
        verdict.use_stages,
        verdict.ttft_p50_change,
        verdict.ttft_p95_change,
        verdict.tpot_change,
        verdict.sustained_rate_change,
        verdict.sentence,
        verdict.replayed_count,
        _stages_from_proto(verdict.judged),
        verdict.favoured,
    )


def duration(value_s: float) -> Duration:
    value = Duration()
    value.FromNanoseconds(round(value_s * 1e9))
    return value


def seconds(value: Duration) -> float:
    return value.ToNanoseconds() / 1e9


def _usage(usage: common_pb2.TokenUsage) -> types.Usage:
    return types.Usage(
        usage.prompt_tokens,
        usage.cached_prompt_tokens,
        usage.output_tokens,
        usage.accepted_draft_tokens,
        usage.rejected_draft_tokens,
    )


def _logprob(value: common_pb2.TokenLogprob) -> types.TokenLogprob:
    return types.TokenLogprob(value.token_id, value.logprob, value.token_bytes)


def _summary(t: pb.TierSummary) -> types.TierSummary:
    return types.TierSummary(
        tier=t.tier,
        model=t.model,
        instance_id=t.instance_id,
        score=t.score if t.HasField("score") else None,
        threshold=t.threshold if t.HasField("threshold") else None,
        accepted=t.accepted,
        usage=_usage(t.usage),
        time_s=seconds(t.time),
        score_reason=t.score_reason,
        flagged=t.flagged,
    )
