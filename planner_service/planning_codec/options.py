"""The options of PlanCascade."""

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.planning_codec.enums import BUDGETS, GOALS, OBJECTIVES, dispatch_from_proto, known
from planner_service.planning_codec.inputs import LENGTHS_OF_ANSWERS, seed_of
from planner_service.planning_options import PERCENTILE, Options
from services.domain.errors import FieldProblem, InvalidRequest


def options_from_proto(request: pb.PlanCascadeRequest) -> Options:
    """InvalidRequest naming every unsound field; see Options.check for what does not go together."""
    problems = []
    if request.HasField("confidence") and not 0 < request.confidence < 1:
        problems.append(FieldProblem("confidence", f"must be over 0 and under 1, not {request.confidence:g}"))
    if request.HasField("gpus") and request.gpus < 1:
        problems.append(FieldProblem("gpus", "must be at least 1"))
    if request.skip and not any(prompt.predicted_scores for prompt in request.inputs.workload.judged):
        problems.append(FieldProblem("inputs.workload.judged", "have no predicted_scores, which skip needs"))
    if request.long_answers and request.inputs.workload.lengths == pb.LENGTH_SOURCE_TRACE:
        problems.append(FieldProblem("inputs.workload.lengths", LENGTHS_OF_ANSWERS))
    if request.HasField("early_error") and not request.inputs.workload.early_after_tokens:
        problems.append(FieldProblem("inputs.workload.early_after_tokens", "are needed for early_error"))
    if problems:
        raise InvalidRequest(*problems)
    return Options(
        gpus=request.gpus if request.HasField("gpus") else None,
        min_quality=request.min_quality if request.HasField("min_quality") else None,
        max_latency_s=request.max_latency_s if request.HasField("max_latency_s") else None,
        goal=known(GOALS, request.goal, "goal"),
        objective=known(OBJECTIVES, request.objective, "objective"),
        confidence=request.confidence if request.HasField("confidence") else None,
        seed=seed_of(request.inputs.workload),
        dispatch=dispatch_from_proto(request.dispatch),
        budget=known(BUDGETS, request.budget, "budget"),
        max_utilisation=request.max_utilisation if request.HasField("max_utilisation") else None,
        skip=request.skip,
        long_answers=request.long_answers,
        best_answer=request.best_answer,
        burst_floor=request.burst_floor if request.HasField("burst_floor") else None,
        burst_mean=request.burst_mean if request.HasField("burst_mean") else None,
        max_tiers=request.max_tiers if request.HasField("max_tiers") else None,
        min_tiers=request.min_tiers if request.HasField("min_tiers") else None,
        early_error=request.early_error if request.HasField("early_error") else None,
        percentile=request.percentile if request.HasField("percentile") else PERCENTILE,
    )
