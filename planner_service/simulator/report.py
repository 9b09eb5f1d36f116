"""Percentiles and rates of served requests. No I/O."""

import numpy as np

from penstock.planner_service.simulator.tier import Served
from penstock.planner_service.simulator.workload import Floats, Workload
from penstock.types.simulated import Percentiles, SimulatedTier


def percentiles(seconds: Floats) -> Percentiles:
    """Of an array of seconds; all zero for none."""
    if not len(seconds):
        return Percentiles(0.0, 0.0, 0.0, 0.0)
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
    return Percentiles(p50, p95, p99, float(seconds.mean()))


def report(name: str, work: Workload, served: Served) -> SimulatedTier:
    """What the requests of a tier felt. ttft_s: arrival to first token. tpot_s: between later tokens, of two and more.
    latency_s: arrival to last."""
    latency = served.finish_s - work.arrival_s
    many = work.output_tokens > 1
    tpot = (served.finish_s - served.first_s)[many] / (work.output_tokens[many] - 1)
    span = float(served.finish_s.max() - work.arrival_s[0]) if len(work) else 0.0
    return SimulatedTier(
        name,
        len(work),
        percentiles(served.first_s - work.arrival_s),
        percentiles(tpot),
        percentiles(latency),
        len(work) / span if span > 0 else 0.0,
        float(work.output_tokens.sum()) / span if span > 0 else 0.0,
        served.busy_share,
        served.preemptions,
    )
