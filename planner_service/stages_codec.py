"""What PlanStages is asked and answers, between proto and the planner's types."""

import numpy as np

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.planning_codec import replica_from_proto, trace_from_proto
from planner_service.proto_codec import stage_to_proto, stages_from_proto
from planner_service.simulator import Replica, Workload
from planner_service.stages import LengthSample, Verdict, check_bounds, count_in_flight, in_flight
from services.domain.errors import InvalidRequest, invalid
from services.domain.stages import QoeModel, StageLayout, stage_problems


def traced_from_proto(request: pb.PlanStagesRequest) -> tuple[Workload, Replica]:
    """The trace, and the instance that it is replayed on. InvalidRequest naming fields that are unsound or out of bounds."""
    work = trace_from_proto(request.trace, "trace")
    replica = replica_from_proto(request.replica, "replica")
    check_bounds(work, replica, request.instance_count, request.max_tokens)
    return work, replica


def sample_from_proto(
    request: pb.PlanStagesRequest, qoe: QoeModel, traced: tuple[Workload, Replica] | None
) -> LengthSample:
    """The request's sequences; without any, those of its trace."""
    if traced is not None and not request.sequences:
        work, replica = traced
        return in_flight(work, count_in_flight(work, qoe, request.instance_count, replica))
    tokens, inputs, outputs = (
        np.array([getattr(s, name) for s in request.sequences], np.int64)
        for name in ("tokens", "input_tokens", "output_tokens")
    )
    outputs = np.where(outputs > 0, outputs, np.maximum(1, tokens - inputs))
    return LengthSample.of(tokens, inputs, outputs)


def against_from_proto(request: pb.PlanStagesRequest) -> StageLayout | None:
    """The layout that a change has to pay against; None for one stage. InvalidRequest naming what is unsound."""
    if not request.against:
        return None
    stages = stages_from_proto(request.against)
    if problems := [*stage_problems(stages, "against")]:
        raise InvalidRequest(*problems)
    if (count := sum(stage.instances for stage in stages)) != request.instance_count:
        raise invalid("against", f"has {count} instances, instance_count is {request.instance_count}")
    return StageLayout(stages)


def verdict_to_proto(verdict: Verdict) -> pb.StagesVerdict:
    return pb.StagesVerdict(
        use_stages=verdict.use_stages,
        ttft_p50_change=verdict.ttft_p50_change,
        ttft_p95_change=verdict.ttft_p95_change,
        tpot_change=verdict.tpot_change,
        sustained_rate_change=verdict.sustained_rate_change,
        sentence=verdict.sentence,
        replayed_count=verdict.replayed,
        judged=() if verdict.layout is None else map(stage_to_proto, verdict.layout.stages),
        favoured=verdict.favoured,
    )
