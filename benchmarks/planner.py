"""How long planning takes, by the number of GPUs: three tiers, as `penstock plan` does it, warm code.

The load grows with the cluster (a request per second for four GPUs), so that every cluster is about equally busy.
Example data (the trace twice over) and the DeepSeek cascade of the examples; three quality targets each. A plan is for a
stretch of 20 latencies, keeps within the usual utilisation and is run on five other stretches.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.spread import median_and_range
from planner_service.cascade_plan import CascadePlan
from planner_service.demand import demand_of
from planner_service.files import read_quality, read_site, read_trace
from planner_service.horizon import RUNS, plan_over_horizon
from planner_service.plan_cascade import plan_cascade
from planner_service.planning_options import MAX_UTILISATION, Options
from planner_service.simulator import Workload
from planner_service.simulator.felt import Objective
from planner_service.site import Demand, Site

EXAMPLES = Path("examples")
GPUS = (16, 32, 80, 256, 1024)
SHARES = (0.3, 0.6, 0.9)  # of the way from the first tier's quality to the last's
SEED = 1


def twice(trace: Workload) -> Workload:
    """The trace, and the trace again after a mean gap."""
    after_s = float(trace.arrival_s[-1] - trace.arrival_s[0]) + 1 / trace.rate_per_s
    return Workload(
        np.concatenate([trace.arrival_s, trace.arrival_s + after_s]),
        np.tile(trace.input_tokens, 2),
        np.tile(trace.output_tokens, 2),
    )


def planned(site: Site, options: Options, demand: Demand, runs: Sequence[Demand]) -> CascadePlan:
    return plan_cascade(site, demand, options, runs=runs)


def measure(rounds: int, objective: Objective) -> list[dict[str, Any]]:
    base = read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")
    judged = read_quality(EXAMPLES / "judged.csv", base.tiers)
    trace = twice(read_trace(EXAMPLES / "trace.csv"))
    rows: list[dict[str, Any]] = []
    for gpus in GPUS:
        site = dataclasses.replace(base, cluster=dataclasses.replace(base.cluster, nodes=gpus // 8))
        for share in SHARES:
            target = judged.worst + share * (judged.best - judged.worst)
            options = Options(min_quality=target, objective=objective, max_utilisation=MAX_UTILISATION)
            times, cpu_times = [], []
            for _ in range(rounds):
                began, cpu_began = time.perf_counter(), time.process_time()
                plan, _ = plan_over_horizon(
                    partial(planned, site, options),
                    site,
                    trace,
                    judged,
                    requests=None,
                    seed=SEED,
                    lengths="quality",
                    rate=gpus / 4,
                )
                times.append(time.perf_counter() - began)
                cpu_times.append(time.process_time() - cpu_began)
            assert plan.felt_interval is not None
            row = {
                "gpus": gpus,
                "objective": objective.value,
                "min_quality": round(target, 2),
                "seconds": times,
                "cpu_seconds": cpu_times,
                "requests": plan.requests,
                "latencies": plan.seconds / plan.felt_s,
                "routings": plan.solution.evaluations,
                "simulations": plan.simulations,
                "proof": plan.solution.proof.value,
                "gap": plan.solution.gap,
                "p95_s": plan.felt_s,
                "interval_s": [plan.felt_interval.low, plan.felt_interval.high],
                "gpus_used": plan.gpus,
            }
            rows.append(row)
            work = f"{plan.requests} requests, {row['routings']} routings, {row['simulations']} simulations, {row['proof']}"
            took = f"{statistics.median(times):6.2f} s ({statistics.median(cpu_times):.2f} s CPU)"
            print(f"{gpus:>5} GPUs, {objective.value}, quality {target:.1f}: {took}  {work}", flush=True)
    return rows


def run(rounds: int) -> None:
    base = read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")
    plan_cascade(  # compile
        base,
        demand_of(
            read_trace(EXAMPLES / "trace.csv"),
            read_quality(EXAMPLES / "judged.csv", base.tiers),
            requests=50,
            seed=SEED,
            lengths="quality",
            rate=4.0,
        ),
        min_quality=70,
    )
    rows = [row for objective in Objective for row in measure(rounds, objective)]
    path = report.write("planner", {"seed": SEED, "runs": RUNS, "rounds": rounds, "rows": rows})
    by_gpus = {gpus: [s for row in rows if row["gpus"] == gpus for s in row["seconds"]] for gpus in GPUS}
    series = {"seconds": [median_and_range(s) for s in by_gpus.values()]}
    groups = [f"{gpus} GPUs" for gpus in GPUS]
    plot = report.bars("planner", "Time to plan three tiers", groups, series, "seconds", log=True)
    print(f"{path}\n{plot}")
