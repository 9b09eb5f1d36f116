"""The planner's contract: domain to proto and back."""

import dataclasses

from penstock.planner.v1 import planner_pb2 as pb
from services.domain.errors import invalid
from services.domain.plans import JudgeUnavailable, Plan, Prediction, Provenance, TierPlan
from services.proto_codec import timestamp, timestamp_seconds

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
            pb.TierPlan(name=t.name, model=t.model, threshold=t.threshold, instance_count=t.instances)
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
    )


def plan_from_proto(plan: pb.Plan) -> Plan:
    """InvalidRequest naming every unsound field."""
    if plan.judge_unavailable not in _POLICY_BACK:
        raise invalid("plan.judge_unavailable", f"unknown policy {plan.judge_unavailable}")
    made = Plan(
        revision=plan.revision,
        tiers=tuple(
            TierPlan(t.name, t.model, t.threshold if t.HasField("threshold") else None, t.instance_count)
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
    )
    made.validate()
    return made


def _prediction(told: pb.Prediction) -> Prediction:
    return Prediction(**{field.name: getattr(told, field.name) for field in dataclasses.fields(Prediction)})
