"""`python -m planner_service.solver METHOD`: one job in a process of its own, so that its caller can kill it.

It reads one request (4 bytes of length, big-endian, then the message) from stdin and writes frames to stdout: a byte that
says what follows, 4 bytes of length, the content. RESPONSE is a serialised response, FAULTS what is wrong with the request,
as JSON [[field, problem], ...]; DONE ends a job that went well. It ends by itself when its stdin does: then no caller waits.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service import planning_codec as codec
from planner_service.cascade_simulation import simulate_cascade
from planner_service.demand import demand_of
from planner_service.files import FileError, read_quality, read_site, read_trace
from planner_service.imputation import imputed
from planner_service.plan_cascade import plan_cascade
from planner_service.plan_file import strategies_of
from planner_service.planning_options import MAX_UTILISATION, Options
from planner_service.proto_codec import qoe_from_proto, stage_to_proto
from planner_service.replan_job import ReplanJob
from planner_service.routing.quality import route
from planner_service.routing.solution import Unreachable
from planner_service.simulator import Percentiles
from planner_service.stages import LengthSample, MoveCost, plan_stages
from services.domain.errors import InvalidRequest, invalid
from services.proto_codec import duration

RESPONSE, FAULTS, DONE = b"R", b"F", b"D"
LEAST_PROMPTS = 300  # drawn from the sampled requests, each with a donor of its own
PROGRESS_EVERY_S = 0.1
NICENESS = 10  # what serves goes first

Emit = Callable[[Any], None]


def plan(payload: bytes, emit: Emit) -> None:
    request = pb.PlanCascadeRequest.FromString(payload)
    began = told_at = time.monotonic()

    def progress(evaluations: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if evaluations == 0 or now - told_at >= PROGRESS_EVERY_S:
            told_at = now
            message = pb.PlanProgress(evaluations=evaluations, elapsed=duration(now - began))
            emit(pb.PlanCascadeResponse(progress=message))

    options = codec.options_from_proto(request)
    site, demand = codec.inputs_from_proto(request.inputs)
    progress(0)
    try:
        result = plan_cascade(site, demand, options, on_evaluation=progress)
        finished = pb.PlanFinished(plan=codec.plan_to_proto(result, site, demand, time.monotonic() - began))
    except Unreachable as error:
        finished = pb.PlanFinished(unreachable=pb.Unreachable(reason=str(error), best=error.best))
    emit(pb.PlanCascadeResponse(finished=finished))


def simulate(payload: bytes, emit: Emit) -> None:
    request = pb.SimulateDeploymentRequest.FromString(payload)
    site, demand = codec.inputs_from_proto(request.inputs)
    thresholds, shapes = codec.shapes_from_proto(request, len(site.tiers))
    demand = demand.skipping(codec.skip_rule_from_proto(request))
    dispatch = codec.dispatch_from_proto(request.dispatch)
    reports, total_s = simulate_cascade(site, demand, thresholds, strategies_of(shapes, site), dispatch)
    emit(
        pb.SimulateDeploymentResponse(
            tiers=[codec.report_to_proto(one) for one in reports],
            end_to_end=codec.percentiles_to_proto(Percentiles.of(total_s)),
            quality=route(demand.requests, thresholds).quality,
            requests=len(total_s),
        )
    )


def replan(payload: bytes, emit: Emit) -> None:
    """A plan for what sampled requests show; `payload` is a ReplanJob. Faults of the files name them."""
    job = ReplanJob.from_json(payload)
    try:
        site = read_site(Path(job.cluster), Path(job.models))
        trace, profile = read_trace(Path(job.trace)), read_quality(Path(job.quality), site.tiers)
    except FileError as error:
        raise invalid("replan", str(error)) from None
    judged = imputed(profile, job.records, max(job.requests, LEAST_PROMPTS), job.seed)
    requests = min(job.requests, len(trace))
    demand = demand_of(trace, judged, requests=requests, seed=job.seed, lengths="quality", rate=job.rate_per_s)
    began = time.monotonic()
    options = Options(gpus=job.gpus, min_quality=job.min_quality, max_latency_s=job.max_latency_s, seed=job.seed)
    try:
        try:
            plan = plan_cascade(site, demand, options, max_utilisation=MAX_UTILISATION)
        except Unreachable:  # an overloaded mesh is better off with the plan that is overloaded least
            plan = plan_cascade(site, demand, options)
        finished = pb.PlanFinished(plan=codec.plan_to_proto(plan, site, demand, time.monotonic() - began))
    except Unreachable as error:
        finished = pb.PlanFinished(unreachable=pb.Unreachable(reason=str(error), best=error.best))
    emit(pb.PlanCascadeResponse(finished=finished))


PUBLISHED_GAIN = 0.3
"""Of the total QoE: less is within the error of QoE models on recorded traces, and no replay has shown that it helps."""


def stages(payload: bytes, emit: Emit) -> None:
    request = pb.PlanStagesRequest.FromString(payload)
    tokens, inputs, outputs = (
        np.array([getattr(s, name) for s in request.sequences], np.int64)
        for name in ("tokens", "input_tokens", "output_tokens")
    )
    outputs = np.where(outputs > 0, outputs, np.maximum(1, tokens - inputs))
    sample = LengthSample.of(tokens, inputs, outputs)
    move = MoveCost(request.kv_bytes_per_token, request.bandwidth_bytes_per_second)
    qoe = qoe_from_proto(request.qoe)
    began = time.monotonic()
    min_gain = PUBLISHED_GAIN if request.publish else 0.0
    result = plan_stages(sample, qoe, request.instance_count, request.max_tokens, move, min_gain=min_gain)
    emit(
        pb.PlanStagesResponse(
            stages=map(stage_to_proto, result.layout.stages),
            quality=result.quality,
            one_stage_quality=result.one_stage_quality,
            chain_quality=result.chain_quality,
            method=result.method.value,
            gap=result.gap,
            elapsed_seconds=time.monotonic() - began,
        )
    )


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
    try:
        METHODS[sys.argv[1]](payload, lambda message: _write(out, RESPONSE, message.SerializeToString()))
    except InvalidRequest as error:
        _write(out, FAULTS, json.dumps([(p.field, p.problem) for p in error.problems]).encode())
    else:
        _write(out, DONE, b"")


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _write(out: BinaryIO, kind: bytes, content: bytes) -> None:
    out.write(kind + len(content).to_bytes(4) + content)
    out.flush()


if __name__ == "__main__":
    main()
