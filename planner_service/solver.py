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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service import planning_codec as codec
from planner_service import stages_codec
from planner_service.cascade_plan import CascadePlan, Felt
from planner_service.cascade_simulation import run_cascade
from planner_service.demand import demand_of
from planner_service.files import FileError, read_quality, read_site, read_trace
from planner_service.imputation import imputed
from planner_service.plan_cascade import chosen_of, plan_cascade
from planner_service.plan_file import strategies_of
from planner_service.planning_options import MAX_UTILISATION, Options
from planner_service.profiles import fit_qoe
from planner_service.proto_codec import qoe_from_proto, qoe_to_proto, stage_to_proto
from planner_service.replan_job import ReplanJob
from planner_service.routing.quality import route
from planner_service.routing.rules import RoutingRules
from planner_service.routing.solution import Unreachable
from planner_service.simulator.cluster import Moves
from planner_service.site import Demand, Site
from planner_service.stages import MoveCost, batches_of, choose, plan_stages, with_layout
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
        site, demand = chosen_of(result, site, demand)
        finished = pb.PlanFinished(plan=codec.plan_to_proto(result, site, demand, time.monotonic() - began))
    except Unreachable as error:
        finished = pb.PlanFinished(
            unreachable=pb.Unreachable(reason=str(error), best=error.best, binds=error.binds.value)
        )
    emit(pb.PlanCascadeResponse(finished=finished))


def simulate(payload: bytes, emit: Emit) -> None:
    request = pb.SimulateDeploymentRequest.FromString(payload)
    site, demand = codec.inputs_from_proto(request.inputs)
    thresholds, shapes = codec.shapes_from_proto(request, len(site.tiers))
    demand = demand.under(codec.rules_from_proto(request, site, demand))
    dispatch = codec.dispatch_from_proto(request.dispatch)
    run = run_cascade(site, demand, thresholds, strategies_of(shapes, site), dispatch)
    felt = Felt.of(run)
    emit(
        pb.SimulateDeploymentResponse(
            tiers=[codec.report_to_proto(one) for one in run.reports],
            end_to_end=codec.percentiles_to_proto(felt.end_to_end),
            quality=route(demand.requests, thresholds).quality,
            requests=len(run.total_s),
            user_latency=codec.user_latency_to_proto(felt),
            cached_share=demand.cached_share,
        )
    )


def replan(payload: bytes, emit: Emit) -> None:
    """A plan for what sampled requests show; `payload` is a ReplanJob. Faults of the files name them.

    After it, a PlanStagesRequest for each tier with length stages: what reaches the tier by the plan, to be replayed.
    """
    job = ReplanJob.from_json(payload)
    try:
        site = read_site(Path(job.cluster), Path(job.models))
        trace, profile = read_trace(Path(job.trace)), read_quality(Path(job.quality), site.tiers)
    except FileError as error:
        raise invalid("replan", str(error)) from None
    judged = imputed(profile, job.records, max(job.requests, LEAST_PROMPTS), job.seed)
    if any(job.least_thresholds):
        judged = replace(judged, least=job.least_thresholds)
    requests = min(job.requests, len(trace))
    demand = demand_of(trace, judged, requests=requests, seed=job.seed, lengths="quality", rate=job.rate_per_s)
    predicts = judged.predicted is not None  # else routers cannot predict either, and ask every tier
    demand = demand.under(
        RoutingRules(job.skip_below if predicts else (), job.long_answers, best_answer=job.best_answer)
    )
    began = time.monotonic()
    options = Options(gpus=job.gpus, min_quality=job.min_quality, max_latency_s=job.max_latency_s, seed=job.seed)
    staged = list[pb.PlanStagesRequest]()
    try:
        try:
            plan = plan_cascade(site, demand, options, max_utilisation=MAX_UTILISATION)
        except Unreachable:  # an overloaded mesh is better off with the plan that is overloaded least
            plan = plan_cascade(site, demand, options)
        finished = pb.PlanFinished(plan=codec.plan_to_proto(plan, site, demand, time.monotonic() - began))
        staged += _staged(site, demand, plan, job.staged)
    except Unreachable as error:
        finished = pb.PlanFinished(
            unreachable=pb.Unreachable(reason=str(error), best=error.best, binds=error.binds.value)
        )
    emit(pb.PlanCascadeResponse(finished=finished))
    for request in staged:
        emit(request)


def _staged(site: Site, demand: Demand, plan: CascadePlan, tiers: Sequence[str]) -> Iterator[pb.PlanStagesRequest]:
    """Of the named tiers, those with requests and replicas of one kind: others cannot be replayed."""
    strategies = plan.solution.deployment.strategies
    works = run_cascade(site, demand, plan.thresholds, strategies, plan.dispatch).works
    for name, strategy, work in zip(site.tiers, strategies, works, strict=True):
        if name in tiers and len(strategy.replicas) == 1 and len(work):
            replica = codec.replica_to_proto(strategy.replicas[0][0])
            yield pb.PlanStagesRequest(tier=name, trace=codec.trace_to_proto(work), replica=replica)


def stages(payload: bytes, emit: Emit) -> None:
    """Stages by the partition, or with a trace by replay; `payload` is a PlanStagesRequest without missing fields."""
    request = pb.PlanStagesRequest.FromString(payload)
    began = time.monotonic()
    traced = stages_codec.traced_from_proto(request) if request.HasField("trace") else None
    if request.HasField("qoe") or traced is None:
        qoe = qoe_from_proto(request.qoe)
    else:
        qoe = fit_qoe(batches_of(traced[1], traced[0]))
    sample = stages_codec.sample_from_proto(request, qoe, traced)
    move = MoveCost(request.kv_bytes_per_token, request.bandwidth_bytes_per_second)
    result = plan_stages(sample, qoe, request.instance_count, request.max_tokens, move)
    response = pb.PlanStagesResponse(qoe=qoe_to_proto(qoe))
    if traced is not None:
        moves = Moves(request.kv_bytes_per_token, request.bandwidth_bytes_per_second, mixed=0.0)
        against = stages_codec.against_from_proto(request)
        verdict = choose(*traced, moves, qoe, request.instance_count, request.max_tokens, against)
        result = with_layout(result, verdict.chosen, sample, qoe, move)
        response.verdict.CopyFrom(stages_codec.verdict_to_proto(verdict))
    response.stages.extend(map(stage_to_proto, result.layout.stages))
    response.quality, response.one_stage_quality = result.quality, result.one_stage_quality
    if result.chain_quality is not None:
        response.chain_quality = result.chain_quality
    if result.gap is not None:
        response.gap = result.gap
    response.method = result.method.value
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
