"""`python -m planner_service.solver METHOD`: one job in a process of its own, so that whoever waits for it can kill it.

It reads one request (4 bytes of length, big-endian, then the message) from stdin and writes frames to stdout: a byte that
says what follows, 4 bytes of length, the content. RESPONSE is a serialised response, FAULTS what is wrong with the request,
as JSON [[field, problem], ...]; DONE ends a job that went well. It ends by itself when its stdin does: nobody waits any more.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from penstock.planner.v1 import planner_pb2 as pb
from planner_service import planning_codec as codec
from planner_service.plan_cascade import plan_cascade, simulate_cascade
from planner_service.plan_file import strategies_of
from planner_service.routing.bilevel import Unreachable
from planner_service.routing.quality import route
from planner_service.simulator import Percentiles
from services.domain.errors import InvalidRequest
from services.proto_codec import duration

RESPONSE, FAULTS, DONE = b"R", b"F", b"D"
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
            told = pb.PlanProgress(evaluations=evaluations, elapsed=duration(now - began))
            emit(pb.PlanCascadeResponse(progress=told))

    options = codec.options_from_proto(request)
    site, demand = codec.inputs_from_proto(request.inputs)
    progress(0)
    try:
        found = plan_cascade(site, demand, on_evaluation=progress, **options)
        finished = pb.PlanFinished(plan=codec.plan_to_proto(found, demand, time.monotonic() - began))
    except Unreachable as error:
        finished = pb.PlanFinished(unreachable=pb.Unreachable(reason=str(error), best=error.best))
    emit(pb.PlanCascadeResponse(finished=finished))


def simulate(payload: bytes, emit: Emit) -> None:
    request = pb.SimulateDeploymentRequest.FromString(payload)
    site, demand = codec.inputs_from_proto(request.inputs)
    thresholds, shapes = codec.shapes_from_proto(request, len(site.tiers))
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


METHODS: dict[str, Callable[[bytes, Emit], None]] = {"PlanCascade": plan, "SimulateDeployment": simulate}


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
