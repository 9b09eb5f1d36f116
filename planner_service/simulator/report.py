"""Percentiles and rates of served requests. No I/O."""

import numpy as np

from penstock.planner_service.simulator.tier import Served
from penstock.planner_service.simulator.workload import Floats, Workload
from penstock.types import simulated


class Percentiles(simulated.Percentiles):
    """Of an array of seconds."""

    __slots__ = ()

    @classmethod
    def of(cls, values: Floats) -> "Percentiles":
        """All zero for no values."""
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p95, p99 = np.percentile(values, (50, 95, 99))
        return cls(float(p50), float(p95), float(p99), float(values.mean()))


def report(name: str, work: Workload, served: Served) -> simulated.SimulatedTier:
    """What the requests of a tier felt. ttft_s: arrival to first token. tpot_s: between later tokens, of two and more.
    latency_s: arrival to last."""
    latency = served.finish_s - work.arrival_s
    many = work.output_tokens > 1
    tpot = (served.finish_s - served.first_s)[many] / (work.output_tokens[many] - 1)
    span = float(served.finish_s.max() - work.arrival_s[0]) if len(work) else 0.0
    return simulated.SimulatedTier(
        name,
        len(work),
        Percentiles.of(served.first_s - work.arrival_s),
        Percentiles.of(tpot),
        Percentiles.of(latency),
        len(work) / span if span > 0 else 0.0,
        float(work.output_tokens.sum()) / span if span > 0 else 0.0,
        served.busy_share,
        served.preemptions,
    )
