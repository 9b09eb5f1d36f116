"""Requests simulated per second by the compiled simulator, compared with a per-step event loop in Python.

The loop (stepwise.py) represents simulators with this design, such as Vidur: events in a heap, each batch formed by a Python
scheduler and simulated by itself. Vidur itself is not run: it also predicts each step with a trained model (cached by batch)
and records metrics of each, so it is probably slower than this loop. Both sides serve the same requests with the same
replicas and must agree on the times of every request.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.spread import median_and_range
from benchmarks.stepwise import replay
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.simulator import Dispatch, Replica, Workload, serve
from penstock.services.domain.hardware import ReplicaShape
from tests.support.inputs import read_site

EXAMPLES = Path("examples")
TIER, SHAPE, REPLICAS = 1, ReplicaShape(4, 1), 4  # Llama 70B on 16 H100
LOADS = (0.3, 0.6, 0.9)  # of the replicas' capacity


def scenario(load: float) -> tuple[Workload, list[Replica]]:
    """The example trace, its gaps stretched to this share of the replicas' capacity."""
    site = read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")
    trace = read_trace(EXAMPLES / "trace.csv")
    replica, why = site.replica(TIER, SHAPE, trace.longest_tokens)
    if replica is None:
        raise SystemExit(why)
    rate = load * REPLICAS * replica.capacity_per_s(float(trace.input_tokens.mean()), float(trace.output_tokens.mean()))
    work = Workload(trace.arrival_s * (trace.rate_per_s / rate), trace.input_tokens, trace.output_tokens)
    return work, [replica] * REPLICAS


def measure(load: float, rounds: int) -> dict[str, Any]:
    work, replicas = scenario(load)
    owner = np.arange(len(work)) % REPLICAS
    compiled_s, stepwise_s = list[float](), list[float]()
    for _ in range(rounds):
        began = time.perf_counter()
        served = serve(work, replicas, Dispatch.ROUND_ROBIN)
        compiled_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        other, _ = replay(work, replicas, owner, lambda at, step: at.latency.step_s(step))
        stepwise_s.append(time.perf_counter() - began)
        if served.steps != other.steps or not np.allclose(served.finish_s, other.finish_s, rtol=1e-9):
            raise RuntimeError("the two simulations differ")
    ratios = [slow / fast for slow, fast in zip(stepwise_s, compiled_s, strict=True)]
    row = {
        "load": load,
        "requests": len(work),
        "steps": served.steps,
        "compiled_s": compiled_s,
        "stepwise_s": stepwise_s,
        "compiled_requests_per_s": len(work) / statistics.median(compiled_s),
        "stepwise_requests_per_s": len(work) / statistics.median(stepwise_s),
        "ratio": statistics.median(ratios),
    }
    line = f"{row['compiled_requests_per_s']:,.0f} requests/s against {row['stepwise_requests_per_s']:,.0f}"
    print(f"load {load}: {served.steps} steps, {line}: {row['ratio']:,.0f}x", flush=True)
    return row


def run(rounds: int) -> None:
    serve(*scenario(LOADS[0]))  # compile
    rows = [measure(load, rounds) for load in LOADS]
    path = report.write("kernel", {"replicas": REPLICAS, "shape": str(SHAPE), "rounds": rounds, "rows": rows})
    series = {
        side: [median_and_range([row["requests"] / s for s in row[f"{side}_s"]]) for row in rows]
        for side in ("compiled", "stepwise")
    }
    plot = report.bars(
        "kernel", "Requests simulated per second", [f"load {load}" for load in LOADS], series, "requests/s", log=True
    )
    print(f"{path}\n{plot}")
