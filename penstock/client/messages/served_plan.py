"""A mesh's plan as a protobuf message, and stages of its tiers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from penstock.client import plans
from penstock.proto.planner.v1 import planner_pb2

_POLICIES = {
    planner_pb2.JUDGE_UNAVAILABLE_POLICY_ESCALATE: "escalate",
    planner_pb2.JUDGE_UNAVAILABLE_POLICY_ACCEPT: "accept",
}

_QOE = tuple(field.name for field in planner_pb2.QoeModel.DESCRIPTOR.fields)  # D0 to D4


def early_checks_from_proto(checks: Iterable[planner_pb2.EarlyCheck]) -> tuple[plans.EarlyCheck, ...]:
    return tuple(plans.EarlyCheck(c.after_tokens, c.reject_below) for c in checks)


def long_answers_from_proto(tier: planner_pb2.TierPlan | planner_pb2.PlannedTier) -> plans.LongAnswers | None:
    rule = tier.long_answers
    return plans.LongAnswers(rule.from_tokens, rule.threshold) if tier.HasField("long_answers") else None


def long_answers_to_proto(rule: plans.LongAnswers | None) -> planner_pb2.LongAnswers | None:
    return None if rule is None else planner_pb2.LongAnswers(from_tokens=rule.from_tokens, threshold=rule.threshold)


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
                early_checks_from_proto(t.early_checks),
                tuple(t.drafters),
                long_answers_from_proto(t),
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
        burst=ladder_from_proto(plan.burst) if plan.HasField("burst") else None,
        best_answer=plan.best_answer,
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
                drafters=t.drafters,
                long_answers=long_answers_to_proto(t.long_answers),
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
        best_answer=plan.best_answer,
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
    trace: Sequence[plans.TraceRow],
    replica: Mapping[str, Any] | None,
    against: Sequence[plans.Stage],
) -> None:
    """Add to a request what is replayed.

    Raises:
        ValueError: replica has a bad field.
    """
    if trace:
        request.trace.CopyFrom(trace_to_proto(trace))
    if replica is not None:
        try:
            ParseDict(dict(replica), request.replica)
        except ParseError as error:
            raise ValueError(f"replica: {error}") from None
    request.against.extend(_stage_to_proto(stage) for stage in against)


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


def trace_to_proto(trace: Sequence[plans.TraceRow]) -> planner_pb2.Trace:
    cached = [row[3] if len(row) == 4 else 0 for row in trace]
    return planner_pb2.Trace(
        arrival_s=[row[0] for row in trace],
        input_tokens=[row[1] for row in trace],
        output_tokens=[row[2] for row in trace],
        cached_tokens=cached if any(cached) else (),
    )


def ladder_from_proto(ladder: planner_pb2.BurstLadder) -> plans.BurstLadder:
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


def _prediction(prediction: planner_pb2.Prediction) -> plans.Prediction:
    return plans.Prediction(
        prediction.objective,
        prediction.target,
        prediction.workload_digest,
        prediction.quality,
        prediction.latency_p95_s,
        prediction.end_to_end_p95_s,
    )


def _stage_to_proto(stage: plans.Stage) -> planner_pb2.Stage:
    return planner_pb2.Stage(from_tokens=stage.from_tokens, to_tokens=stage.to_tokens, instance_count=stage.instances)


def _stages_from_proto(stages: Iterable[planner_pb2.Stage]) -> tuple[plans.Stage, ...]:
    return tuple(plans.Stage(s.from_tokens, s.to_tokens, s.instance_count) for s in stages)


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
