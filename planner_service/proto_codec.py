"""The planner's contract: domain to proto and back."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.burst_codec import ladder_from_proto, ladder_to_proto
from services.domain.early_checks import MAX_EARLY_CHECKS, EarlyCheck
from services.domain.errors import invalid
from services.domain.instances import InstanceRecord
from services.domain.long_answers import LongAnswers
from services.domain.plans import JudgeUnavailable, Plan, Prediction, Provenance, TierPlan
from services.domain.stages import QoeModel, Stage
from services.proto_codec import at_most, timestamp, timestamp_seconds

MAX_TIERS = 64
MAX_STAGES = 1_024  # of one tier; each holds at least one instance

_POLICY = {
    JudgeUnavailable.ESCALATE: pb.JUDGE_UNAVAILABLE_POLICY_ESCALATE,
    JudgeUnavailable.ACCEPT: pb.JUDGE_UNAVAILABLE_POLICY_ACCEPT,
}
_POLICY_BACK = {value: key for key, value in _POLICY.items()} | {
    pb.JUDGE_UNAVAILABLE_POLICY_UNSPECIFIED: JudgeUnavailable.ESCALATE
}


def plan_to_proto(plan: Plan) -> pb.Plan:
    prediction = plan.provenance.prediction
    return pb.Plan(
        revision=plan.revision,
        tiers=[
            pb.TierPlan(
                name=t.name,
                model=t.model,
                threshold=t.threshold,
                instance_count=t.instances,
                stages=map(stage_to_proto, t.stages),
                qoe=None if t.qoe is None else qoe_to_proto(t.qoe),
                skip_below=t.skip_below,
                early_checks=early_checks_to_proto(t.early_checks),
                drafters=t.drafters,
                long_answers=long_answers_to_proto(t.long_answers),
            )
            for t in plan.tiers
        ],
        scorer=plan.scorer,
        judge_unavailable=_POLICY[plan.judge_unavailable],
        provenance=pb.Provenance(
            source=plan.provenance.source,
            note=plan.provenance.note,
            created_at=timestamp(plan.provenance.created_at),
            input_digest=plan.provenance.input_digest,
            prediction=pb.Prediction(**dataclasses.asdict(prediction)) if prediction is not None else None,
        ),
        burst=None if plan.burst is None else ladder_to_proto(plan.burst),
        best_answer=plan.best_answer,
    )


def early_checks_to_proto(checks: Sequence[EarlyCheck]) -> list[pb.EarlyCheck]:
    return [pb.EarlyCheck(after_tokens=c.after_tokens, reject_below=c.reject_below) for c in checks]


def early_checks_from_proto(checks: Iterable[pb.EarlyCheck]) -> tuple[EarlyCheck, ...]:
    return tuple(EarlyCheck(c.after_tokens, c.reject_below) for c in checks)


def long_answers_to_proto(rule: LongAnswers | None) -> pb.LongAnswers | None:
    return None if rule is None else pb.LongAnswers(from_tokens=rule.from_tokens, threshold=rule.threshold)


def long_answers_from_proto(rule: pb.LongAnswers) -> LongAnswers:
    return LongAnswers(rule.from_tokens, rule.threshold)


def plan_from_proto(plan: pb.Plan) -> Plan:
    """InvalidRequest naming every unsound field."""
    if plan.judge_unavailable not in _POLICY_BACK:
        raise invalid("plan.judge_unavailable", f"unknown policy {plan.judge_unavailable}")
    at_most(plan.tiers, MAX_TIERS, "plan.tiers", "tiers")
    for i, tier in enumerate(plan.tiers):
        at_most(tier.stages, MAX_STAGES, f"plan.tiers[{i}].stages", "stages")
        at_most(tier.early_checks, MAX_EARLY_CHECKS, f"plan.tiers[{i}].early_checks", "checks")
        at_most(tier.drafters, MAX_TIERS, f"plan.tiers[{i}].drafters", "models")
    created = Plan(
        revision=plan.revision,
        tiers=tuple(
            TierPlan(
                t.name,
                t.model,
                t.threshold if t.HasField("threshold") else None,
                t.instance_count,
                stages_from_proto(t.stages),
                qoe_from_proto(t.qoe) if t.HasField("qoe") else None,
                t.skip_below if t.HasField("skip_below") else None,
                early_checks_from_proto(t.early_checks),
                tuple(t.drafters),
                long_answers_from_proto(t.long_answers) if t.HasField("long_answers") else None,
            )
            for t in plan.tiers
        ),
        scorer=plan.scorer,
        judge_unavailable=_POLICY_BACK[plan.judge_unavailable],
        provenance=Provenance(
            plan.provenance.source or "operator",
            plan.provenance.note,
            timestamp_seconds(plan.provenance.created_at),
            plan.provenance.input_digest,
            _prediction(plan.provenance.prediction) if plan.provenance.HasField("prediction") else None,
        ),
        burst=ladder_from_proto(plan.burst, "plan.burst") if plan.HasField("burst") else None,
        best_answer=plan.best_answer,
    )
    created.validate()
    return created


def _prediction(message: pb.Prediction) -> Prediction:
    return Prediction(**{field.name: getattr(message, field.name) for field in dataclasses.fields(Prediction)})


def stage_to_proto(stage: Stage) -> pb.Stage:
    return pb.Stage(from_tokens=stage.from_tokens, to_tokens=stage.to_tokens, instance_count=stage.instances)


def stages_from_proto(stages: Iterable[pb.Stage]) -> tuple[Stage, ...]:
    return tuple(Stage(s.from_tokens, s.to_tokens, s.instance_count) for s in stages)


def qoe_to_proto(model: QoeModel) -> pb.QoeModel:
    d0, d1, d2, d3, d4 = model.coefficients
    return pb.QoeModel(
        batch_seconds=d0,
        request_seconds=d1,
        input_token_seconds=d2,
        input_token_squared_seconds=d3,
        context_token_seconds=d4,
    )


def qoe_from_proto(model: pb.QoeModel) -> QoeModel:
    """InvalidRequest naming the coefficient that is unsound."""
    return QoeModel(
        model.batch_seconds,
        model.request_seconds,
        model.input_token_seconds,
        model.input_token_squared_seconds,
        model.context_token_seconds,
    )


def with_stages(tier: TierPlan, response: pb.PlanStagesResponse) -> TierPlan:
    """The tier with the stages that a replay favours; without any if it favours one stage."""
    stages = stages_from_proto(response.stages) if response.verdict.use_stages else ()
    return dataclasses.replace(tier, stages=stages, qoe=qoe_from_proto(response.qoe))


def completed(request: pb.PlanStagesRequest, tier: TierPlan, workers: Sequence[InstanceRecord]) -> pb.PlanStagesRequest:
    """The request with what it leaves out filled in from the tier's plan and from what its workers hold.

    Raises:
        InvalidRequest: a field is missing there too, or fields do not go together; the error names it.
    """
    replayed = request.HasField("trace")
    if replayed and not request.HasField("replica"):
        raise invalid("replica", "missing: a trace is replayed on it")
    if not replayed and request.HasField("replica"):
        raise invalid("trace", "missing: there is nothing to replay on the replica")
    if not replayed and request.against:
        raise invalid("trace", "missing: without a replay nothing is held against a layout")
    if not replayed and request.publish:
        raise invalid("trace", "missing: only a layout that a replay favours is published")
    at_most(request.against, MAX_STAGES, "against", "stages")
    created = pb.PlanStagesRequest()
    created.CopyFrom(request)
    if not request.HasField("instance_count"):
        created.instance_count = tier.instances
    elif request.publish and request.instance_count != tier.instances:
        raise invalid("instance_count", f"must be the tier's, {tier.instances}, for the layout to be published")
    if not request.HasField("qoe"):
        if tier.qoe is not None:
            created.qoe.CopyFrom(qoe_to_proto(tier.qoe))
        elif not replayed:
            raise invalid("qoe", f"missing, and the plan has none for tier {tier.name}")
    if not request.sequences and not replayed:
        held = [s for w in workers if w.load is not None for s in w.load.in_flight]
        if not held:
            raise invalid("sequences", f"missing, and the instances of tier {tier.name} hold none at this moment")
        created.sequences.extend(pb.SequenceInFlight(input_tokens=s.input_tokens, tokens=s.tokens) for s in held)
    if not request.HasField("max_tokens"):
        contexts = [w.model.max_context_tokens for w in workers if w.model is not None]
        if not contexts:
            raise invalid("max_tokens", f"missing, and tier {tier.name} has no instance to tell its context")
        created.max_tokens = min(contexts) + 1
    if request.kv_bytes_per_token == 0:
        created.kv_bytes_per_token = max(
            (w.model.kv_bytes_per_token for w in workers if w.model is not None), default=0.0
        )
    if request.bandwidth_bytes_per_second == 0:
        measured = [w.load.kv_bytes_per_s for w in workers if w.load is not None and w.load.kv_bytes_per_s > 0]
        if not measured:
            problem = (
                f"missing, and no instance of tier {tier.name} has measured it: that takes two that can move requests"
            )
            raise invalid("bandwidth_bytes_per_second", problem)
        created.bandwidth_bytes_per_second = statistics.median(measured)
    return created
