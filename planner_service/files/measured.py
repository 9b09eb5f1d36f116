"""Measured replicas and traces of a question, as the simulator has them, and back."""

from pathlib import Path

import numpy as np

from penstock.planner_service.simulator import Replica, Workload
from penstock.question_files.tables import load_trace
from penstock.services.domain.errors import InvalidRequest, check, invalid
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.planning import MeasuredReplica, Trace
from penstock.types.problems import FieldProblem
from penstock.types.ranges import range_problems


def replica_of(measured: MeasuredReplica, at: str, gpu: str = "") -> Replica:
    """gpu: the type that plans call it by; empty where there is one.

    Raises:
        InvalidRequest: A field is unsound; named from `at` on.
    """
    check(range_problems(measured, at))
    if not np.isfinite([*measured.knot_tokens, *measured.knot_s]).all():
        raise invalid(at, "step times must be finite")
    try:
        terms = (measured.context_token_s, measured.pair_s, measured.gap_s)
        latency = StepLatencyModel(measured.knot_tokens, measured.knot_s, *terms)
    except InvalidRequest as error:
        all_problems = (FieldProblem(f"{at}.{p.field.removeprefix('latency.')}", p.problem) for p in error.problems)
        raise InvalidRequest(*all_problems) from None
    shape = ReplicaShape(measured.tp, measured.pp, gpu, measured.ep, measured.attn_dp)
    return Replica(shape, latency, measured.kv_tokens, measured.engine)


def measured_of(replica: Replica) -> MeasuredReplica:
    shape, latency = replica.shape, replica.latency
    return MeasuredReplica(
        latency.knot_tokens,
        latency.knot_s,
        shape.tp,
        shape.pp,
        replica.kv_tokens,
        replica.limits,
        latency.context_token_s,
        latency.pair_s,
        latency.gap_s,
        shape.ep,
        shape.attn_dp,
    )


def workload_of(trace: Trace, at: str = "trace") -> Workload:
    """Ordered by arrival. InvalidRequest names the field that is unsound, from `at` on."""
    count = len(trace.arrival_s)
    if not count:
        raise invalid(f"{at}.arrival_s", "no requests")
    check(range_problems(trace, at))
    arrival_s, columns = np.array(trace.arrival_s, float), []
    for name in ("input_tokens", "output_tokens", "cached_tokens"):
        values = np.array(getattr(trace, name) or (() if name != "cached_tokens" else (0,) * count), np.int64)
        if len(values) != count:
            raise invalid(f"{at}.{name}", f"{count} requests arrive, {len(values)} have it")
        columns.append(values)
    inputs, outputs, cached = columns
    if len(whole := np.flatnonzero(cached >= inputs)):
        first = int(whole[0])
        problem = f"must be less than input_tokens, {inputs[first]}, not {cached[first]}"
        raise invalid(f"{at}.cached_tokens[{first}]", problem)
    order = np.argsort(arrival_s, kind="stable")
    return Workload(arrival_s[order], inputs[order], outputs[order], cached_tokens=cached[order])


def read_trace(path: Path) -> Workload:
    """The trace of a file; see load_trace for the columns."""
    return workload_of(load_trace(path))


def trace_of(work: Workload) -> Trace:
    cached = tuple(work.cached_tokens.tolist()) if work.cached_tokens.any() else ()
    lengths = (tuple(work.input_tokens.tolist()), tuple(work.output_tokens.tolist()))
    return Trace(tuple(work.arrival_s.tolist()), *lengths, cached)
