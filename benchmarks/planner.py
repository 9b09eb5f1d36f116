"""Time of planning by the number of GPUs: three tiers, 500 sampled requests, warm code.

The load grows with the cluster (a request per second for four GPUs), so that every cluster is about equally busy. Example
data and the DeepSeek cascade of the examples; three quality targets each.
"""

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.spread import median_and_range
from planner_service.demand import demand_of
from planner_service.files import read_quality, read_site, read_trace
from planner_service.plan_cascade import plan_cascade

EXAMPLES = Path("examples")
GPUS = (16, 32, 80, 256, 1024)
REQUESTS = 500
SHARES = (0.3, 0.6, 0.9)  # of the way from the first tier's quality to the last's
SEED = 1


def measure(rounds: int) -> list[dict[str, Any]]:
    base = read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")
    judged = read_quality(EXAMPLES / "judged.csv", base.tiers)
    trace = read_trace(EXAMPLES / "trace.csv")
    rows: list[dict[str, Any]] = []
    for gpus in GPUS:
        site = dataclasses.replace(base, cluster=dataclasses.replace(base.cluster, nodes=gpus // 8))
        demand = demand_of(trace, judged, requests=REQUESTS, seed=SEED, lengths="quality", rate=gpus / 4)
        for share in SHARES:
            target = judged.worst + share * (judged.best - judged.worst)
            times, cpu_times = [], []
            for _ in range(rounds):
                began, cpu_began = time.perf_counter(), time.process_time()
                plan = plan_cascade(site, demand, min_quality=target)
                times.append(time.perf_counter() - began)
                cpu_times.append(time.process_time() - cpu_began)
            row = {
                "gpus": gpus,
                "min_quality": round(target, 2),
                "seconds": times,
                "cpu_seconds": cpu_times,
                "routings": plan.solution.evaluations,
                "simulations": plan.simulations,
                "proof": plan.solution.proof.value,
                "latency_p95_s": plan.latency_p95_s,
                "gpus_used": sum(tier.gpus for tier in plan.tiers),
            }
            rows.append(row)
            line = f"{row['routings']} routings, {row['simulations']} simulations, {row['proof']}"
            duration = f"{statistics.median(times):6.2f} s ({statistics.median(cpu_times):.2f} s CPU)"
            print(f"{gpus:>5} GPUs, quality {target:.1f}: {duration}  {line}", flush=True)
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
    rows = measure(rounds)
    path = report.write("planner", {"seed": SEED, "requests": REQUESTS, "rounds": rounds, "rows": rows})
    by_gpus = {gpus: [s for row in rows if row["gpus"] == gpus for s in row["seconds"]] for gpus in GPUS}
    series = {"seconds": [median_and_range(s) for s in by_gpus.values()]}
    groups = [f"{gpus} GPUs" for gpus in GPUS]
    plot = report.bars("planner", "Time to plan three tiers", groups, series, "seconds", log=True)
    print(f"{path}\n{plot}")
