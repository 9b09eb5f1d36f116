"""The trace: arrivals and lengths of requests, in columns."""

import numpy as np

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.simulator import Workload
from planner_service.simulator.workload import MAX_TOKENS, Ints
from services.domain.errors import invalid


def trace_from_proto(trace: pb.Trace, at: str) -> Workload:
    columns = {"input_tokens": trace.input_tokens, "output_tokens": trace.output_tokens}
    arrival_s = np.array(trace.arrival_s, float)
    if not len(arrival_s):
        raise invalid(f"{at}.arrival_s", "no requests")
    if not np.isfinite(arrival_s).all():
        raise invalid(f"{at}.arrival_s", "must be finite")
    arrays = []
    for name, column in columns.items():
        values = np.array(column, np.int64)
        if len(values) != len(arrival_s):
            raise invalid(f"{at}.{name}", f"{len(arrival_s)} requests arrive, {len(values)} have it")
        if values.min() < 1:
            raise invalid(f"{at}.{name}[{int(values.argmin())}]", "must be at least 1")
        if values.max() > MAX_TOKENS:
            raise invalid(
                f"{at}.{name}[{int(values.argmax())}]", f"must be at most {MAX_TOKENS:,}, not {values.max():,}"
            )
        arrays.append(values)
    cached = _cached_tokens(trace, arrays[0], f"{at}.cached_tokens")
    order = np.argsort(arrival_s, kind="stable")
    return Workload(arrival_s[order], arrays[0][order], arrays[1][order], cached_tokens=cached[order])


def _cached_tokens(trace: pb.Trace, input_tokens: Ints, at: str) -> Ints:
    """(N), all 0 where the trace has none."""
    cached = np.array(trace.cached_tokens or [0] * len(input_tokens), np.int64)
    if len(cached) != len(input_tokens):
        raise invalid(at, f"{len(input_tokens)} requests arrive, {len(cached)} have it")
    if len(whole := np.flatnonzero(cached >= input_tokens)):
        first = int(whole[0])
        raise invalid(f"{at}[{first}]", f"must be less than input_tokens, {input_tokens[first]}, not {cached[first]}")
    return cached


def trace_to_proto(work: Workload) -> pb.Trace:
    return pb.Trace(
        arrival_s=work.arrival_s.tolist(),
        input_tokens=work.input_tokens.tolist(),
        output_tokens=work.output_tokens.tolist(),
        cached_tokens=work.cached_tokens.tolist() if work.cached_tokens.any() else (),
    )
