"""`python -m penstock.planner_service.live.solver METHOD`: one job in a process of its own, so that its caller can kill it.

It reads one request (4 bytes of length, big-endian, then the message) from stdin and writes frames to stdout: a byte that
says what follows, 4 bytes of length, the content. RESPONSE is a serialised response, FAULTS what is wrong with the request,
as JSON [[field, problem], ...]; DONE ends a job that went well. It ends by itself when its stdin does: then no caller waits.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, TypeVar

from penstock.field_mapping import MappingError
from penstock.mapper import from_message, to_message
from penstock.planner_service.api import plans, simulations
from penstock.planner_service.api.stages import staged
from penstock.planner_service.codecs import stages_codec
from penstock.planner_service.codecs.proto_codec import qoe_from_proto
from penstock.planner_service.files.measured import measured_of, trace_of, workload_of
from penstock.planner_service.files.quality import judged_for
from penstock.planner_service.files.site import site_of
from penstock.planner_service.live.replan_job import ReplanJob
from penstock.planner_service.question.imputation import imputed
from penstock.planner_service.question.planning_options import Options
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator.cluster import Moves
from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.question_files.errors import FileError
from penstock.question_files.questions import load_question
from penstock.services.domain.errors import InvalidRequest, invalid
from penstock.types import planned as types
from penstock.types.deployments import Deployment
from penstock.types.planning import PlanningQuestion

RESPONSE, FAULTS, DONE = b"R", b"F", b"D"
LEAST_PROMPTS, USUAL_PROMPTS = 300, 500  # drawn from the sampled requests, each with a donor of its own
PROGRESS_EVERY_S = 0.1
NICENESS = 10  # what serves goes first

Emit = Callable[[Any], None]
_Value = TypeVar("_Value")


def plan(payload: bytes, emit: Emit) -> None:
    question = _read(pb.PlanCascadeRequest.FromString(payload).question, PlanningQuestion, "question")
    began = told_at = time.monotonic()

    def progress(evaluations: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if evaluations == 0 or now - told_at >= PROGRESS_EVERY_S:
            told_at = now
            _tell(emit, types.PlanProgress(evaluations, now - began))

    progress(0)
    _tell(emit, plans.plan(question, progress).report())


def simulate(payload: bytes, emit: Emit) -> None:
    request = pb.SimulateDeploymentRequest.FromString(payload)
    question = _read(request.question, PlanningQuestion, "question")
    simulation = simulations.simulate(question, _read(request.deployment, Deployment, "deployment"))
    emit(pb.SimulateDeploymentResponse(simulation=to_message(simulation, pb.Simulation)))


def _read(message: Any, kind: type[_Value], at: str) -> _Value:
    """InvalidRequest names the field that cannot be read."""
    try:
        return from_message(message, kind)
    except MappingError as error:
        field = error.field if error.field.startswith("[") or not error.field else f".{error.field}"
        raise invalid(f"{at}{field}", error.problem) from None


def _tell(emit: Emit, event: types.PlanProgress | types.CascadePlan | types.Unreachable) -> None:
    emit(to_message(event, pb.PlanCascadeResponse))


def replan(payload: bytes, emit: Emit) -> None:
    """A plan for what sampled requests show; `payload` is a ReplanJob. Faults of the files name them.

    After it, a PlanStagesRequest for each tier with length stages: what reaches the tier by the plan, to be replayed.
    """
    job = ReplanJob.from_json(payload)
    try:
        question = load_question(job.question)
    except FileError as error:
        raise invalid("replan", str(error)) from None
    site = site_of(question.cluster, question.models)
    options = Options.of(replace(question, rate=job.rate_per_s), len(site.tiers))
    prompts = max(options.requests or USUAL_PROMPTS, LEAST_PROMPTS)
    judged = imputed(judged_for(question.quality, site), job.records, prompts, options.seed)
    rules = job.rules
    if judged.predicted is None:  # then routers cannot predict either, and ask every tier
        rules = replace(rules, skip_below=(), skip_for=())
    limits = (*rules.skip_below, *rules.skip_for)
    if not any(limit is not None for limit in limits):  # limits stay as they are: none are looked for
        judged = replace(judged, predicted=None)
    trace = workload_of(question.trace)
    try:
        planned = plans.plan_for(site, trace, judged, options, under=rules)
    except Unreachable:  # an overloaded mesh is better off with the plan that is overloaded least
        planned = plans.plan_for(site, trace, judged, replace(options, allow_overload=True), under=rules)
    traced = list(_staged(planned, job.staged))
    _tell(emit, planned.report())
    for request in traced:
        emit(request)


def _staged(planned: plans.Planned, tiers: Sequence[str]) -> Iterator[pb.PlanStagesRequest]:
    """Of the named tiers, those with requests and replicas of one kind: others cannot be replayed."""
    plan, site = planned.plan, planned.site
    strategies = plan.solution.deployment.strategies
    works = run_cascade(site, planned.demand, plan.thresholds, strategies, plan.dispatch).works
    for name, strategy, work in zip(site.tiers, strategies, works, strict=True):
        if name in tiers and len(strategy.replicas) == 1 and len(work):
            replica = to_message(measured_of(strategy.replicas[0][0]), pb.MeasuredReplica)
            yield pb.PlanStagesRequest(tier=name, trace=to_message(trace_of(work), pb.Trace), replica=replica)


def stages(payload: bytes, emit: Emit) -> None:
    """Stages by the partition, or with a trace by replay; `payload` is a PlanStagesRequest without missing fields."""
    request = pb.PlanStagesRequest.FromString(payload)
    began = time.monotonic()
    traced = stages_codec.traced_from_proto(request) if request.HasField("trace") else None
    planned = staged(
        request.instance_count,
        request.max_tokens,
        Moves(request.kv_bytes_per_token, request.bandwidth_bytes_per_second),
        qoe=qoe_from_proto(request.qoe) if request.HasField("qoe") or traced is None else None,
        sample=stages_codec.sample_from_proto(request) if request.sequences or traced is None else None,
        trace=traced,
        against=stages_codec.against_from_proto(request),
    )
    result = planned.plan
    response = pb.PlanStagesResponse(qoe=to_message(planned.qoe, pb.QoeModel))
    if planned.verdict is not None:
        response.verdict.CopyFrom(stages_codec.verdict_to_proto(planned.verdict))
    response.stages.extend([to_message(stage, pb.Stage) for stage in result.layout.stages])
    response.quality, response.one_stage_quality = result.quality, result.one_stage_quality
    response.gap = result.gap
    response.elapsed_seconds = time.monotonic() - began
    emit(response)


METHODS: dict[str, Callable[[bytes, Emit], None]] = {
    "PlanCascade": plan,
    "Replan": replan,
    "SimulateDeployment": simulate,
    "PlanStages": stages,
}


def main() -> None:
    os.nice(NICENESS)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no frame
    payload = sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(4)))
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def emit(message: Any) -> None:
        _write(out, RESPONSE, message.SerializeToString())

    try:
        METHODS[sys.argv[1]](payload, emit)
    except InvalidRequest as error:
        _write(out, FAULTS, json.dumps([(p.field, p.problem) for p in error.problems]).encode())
        return
    except Unreachable as error:  # of those that plan a cascade
        _tell(emit, types.Unreachable(str(error), error.best, error.binds.value))
    _write(out, DONE, b"")


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _write(out: BinaryIO, kind: bytes, content: bytes) -> None:
    out.write(kind + len(content).to_bytes(4) + content)
    out.flush()


if __name__ == "__main__":
    main()
