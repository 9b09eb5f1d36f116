"""What PlanStages is asked and answers, between proto and the planner's types."""

import numpy as np

from penstock.mapper import from_message, to_message
from penstock.planner_service.codecs.proto_codec import stages_from_proto
from penstock.planner_service.files.measured import replica_of, workload_of
from penstock.planner_service.simulator import Replica, Workload
from penstock.planner_service.stages.choice import check_bounds
from penstock.planner_service.stages.replay import ReplayVerdict
from penstock.planner_service.stages.sample import LengthSample
from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.services.domain.errors import check, invalid
from penstock.services.domain.stages.layout import StageLayout, stage_problems
from penstock.types.planning import MeasuredReplica, Trace


def traced_from_proto(request: pb.PlanStagesRequest) -> tuple[Workload, Replica]:
    """The trace, and the instance that it is replayed on. InvalidRequest naming fields that are unsound or out of bounds."""
    work = workload_of(from_message(request.trace, Trace))
    replica = replica_of(from_message(request.replica, MeasuredReplica), "replica")
    check_bounds(work, replica, request.instance_count, request.max_tokens)
    return work, replica


def sample_from_proto(request: pb.PlanStagesRequest) -> LengthSample:
    """The request's sequences."""
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
    check(stage_problems(stages, "against"))
    if (count := sum(stage.instances for stage in stages)) != request.instance_count:
        raise invalid("against", f"has {count} instances, instance_count is {request.instance_count}")
    return StageLayout(stages)


def verdict_to_proto(verdict: ReplayVerdict) -> pb.StagesVerdict:
    return pb.StagesVerdict(
        use_stages=verdict.use_stages,
        **verdict.changes._asdict(),
        sentence=verdict.sentence,
        replayed_count=verdict.replayed,
        judged=() if verdict.layout is None else [to_message(stage, pb.Stage) for stage in verdict.layout.stages],
        favoured=verdict.favoured,
    )
