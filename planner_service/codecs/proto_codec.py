"""The planner's contract: domain to proto and back."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from penstock.field_mapping import MappingError
from penstock.mapper import from_message, write
from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.services.domain.errors import check, invalid
from penstock.services.domain.instances import InstanceRecord
from penstock.services.domain.plans import check_plan
from penstock.services.domain.stages.qoe import qoe_problems
from penstock.services.proto_codec import at_most
from penstock.types.plans import MAX_STAGES, Plan, QoeModel, Stage, TierPlan


def plan_from_proto(message: pb.Plan) -> Plan:
    """InvalidRequest naming every unsound field."""
    try:
        plan = from_message(message, Plan)
    except MappingError as error:
        raise invalid(f"plan.{error.field}", error.problem) from None
    check_plan(plan)
    return plan


def stages_from_proto(stages: Iterable[pb.Stage]) -> tuple[Stage, ...]:
    return tuple([from_message(stage, Stage) for stage in stages])


def qoe_from_proto(message: pb.QoeModel) -> QoeModel:
    """InvalidRequest naming the coefficient that is unsound."""
    qoe = from_message(message, QoeModel)
    check(qoe_problems(qoe))
    return qoe


def with_stages(tier: TierPlan, response: pb.PlanStagesResponse) -> TierPlan:
    """The tier with the stages that a replay favours; without any if it favours one stage."""
    stages = stages_from_proto(response.stages) if response.verdict.use_stages else ()
    return dataclasses.replace(tier, stages=stages, qoe=qoe_from_proto(response.qoe))


def completed(request: pb.PlanStagesRequest, tier: TierPlan, workers: Sequence[InstanceRecord]) -> pb.PlanStagesRequest:
    """The request with what it leaves out filled in from the tier's plan and from what its workers hold.

    Raises:
        InvalidRequest: a field is missing there too, or fields do not go together; the error names it.
    """
    _check_replay(request)
    created = pb.PlanStagesRequest()
    created.CopyFrom(request)
    replayed = request.HasField("trace")
    if not request.HasField("instance_count"):
        created.instance_count = tier.instances
    elif request.publish and request.instance_count != tier.instances:
        raise invalid("instance_count", f"must be the tier's, {tier.instances}, for the layout to be published")
    if not request.HasField("qoe"):
        if tier.qoe is not None:
            write(tier.qoe, created.qoe)
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
        held_bytes = (w.model.kv_bytes_per_token for w in workers if w.model is not None)
        created.kv_bytes_per_token = max(held_bytes, default=0.0)
    if request.bandwidth_bytes_per_second == 0:
        measured = [w.load.kv_bytes_per_s for w in workers if w.load is not None and w.load.kv_bytes_per_s > 0]
        if not measured:
            why = f"no instance of tier {tier.name} has measured it: that takes two that can move requests"
            raise invalid("bandwidth_bytes_per_second", f"missing, and {why}")
        created.bandwidth_bytes_per_second = statistics.median(measured)
    return created


def _check_replay(request: pb.PlanStagesRequest) -> None:
    """InvalidRequest where fields do not go together."""
    if request.HasField("trace"):
        if not request.HasField("replica"):
            raise invalid("replica", "missing: a trace is replayed on it")
    elif request.HasField("replica"):
        raise invalid("trace", "missing: there is nothing to replay on the replica")
    elif request.against:
        raise invalid("trace", "missing: without a replay nothing is held against a layout")
    elif request.publish:
        raise invalid("trace", "missing: only a layout that a replay favours is published")
    at_most(request.against, MAX_STAGES, "against", "stages")
