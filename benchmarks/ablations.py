"""The effect of each part of the optimiser: plans without one part, at the same quality (CASCADIA, figure 9).

- `uniform parallelism`: tensor parallelism within a server and data parallelism across servers, for every tier; GPUs and
  thresholds are still optimised (figure 9, i).
- `uniform allocation`: every tier that has requests gets the same number of GPUs, thresholds and parallelism are still
  optimised (figure 9, ii).
- `thresholds apart`: one threshold for all tiers, the lowest that reaches the quality, with an optimal deployment.
- `largest alone`: no cascade; all GPUs for the last tier, with the best parallelism.

Judged families of the public data are paired with published traces, and the DeepSeek cascade with the example data; arrivals
are scaled to one and two times the rate that saturates the largest model alone on all GPUs. The result is the ratio of
latencies (p95 of the slowest tier, and simulated end to end) to those of the full optimiser at the same quality target.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.public_data import public
from penstock.planner_service.deployment.search import LatencyTable, Parts
from penstock.planner_service.files.hardware import model_of_catalogue
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.planning.deployers import deployer_for
from penstock.planner_service.question.demand import demand_of
from penstock.planner_service.question.site import Demand, Site, replica_kinds
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.goals import least_latency
from penstock.planner_service.routing.quality import SKIPPED, route
from penstock.planner_service.routing.solution import Deployment, Solution, Unreachable
from penstock.planner_service.simulator import Dispatch
from tests.support.inputs import read_quality, read_site

EXAMPLES = Path("examples")
TIERS = ("small", "medium", "large")
# judged family and trace (None: those of the examples), models of the catalogue with the family's sizes, or the nearest
CASES = (
    (
        None,
        None,
        ("deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b", "deepseek-r1-671b-awq"),
    ),
    (
        "quality/alpaca1_tulu2-dpo_7B-13B-70B.csv.gz",
        "traces/azure2023_conv.csv.gz",
        ("deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-qwen-14b", "llama-3.1-70b"),
    ),
    (
        "quality/alpaca2_fusechat-llama_1B-3B-8B.csv.gz",
        "traces/servegen_m-small_sample_1h.csv.gz",
        ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"),
    ),
    (
        "quality/wildbench_reka_edge-flash-core.csv.gz",
        "traces/azure2023_conv.csv.gz",
        ("qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b"),
    ),
)
SHARES = (0.3, 0.6, 0.9)  # of the way from the first tier's quality to the last's
LOADS = (1.0, 2.0)  # of what the largest model alone can serve
GPUS, REQUESTS, SEED = 32, 2000, 1
WHOLE = "whole optimiser"


class UniformParallelism(LatencyTable):
    """Tensor parallelism over as much of a server as the tier has, data parallelism across servers."""

    def _candidates(self, gpus: int) -> list[Parts]:
        flat = [k for k, kind in enumerate(self._kinds) if kind.shape.pp == 1 and kind.shape.gpus <= gpus]
        if not flat:
            return []
        widest = max(flat, key=lambda k: self._kinds[k].shape.tp)
        return [((widest, min(len(self._work), gpus // self._kinds[widest].shape.gpus)),)]


class UniformlyParallel(Deployer):
    table = UniformParallelism


class UniformlyAllocated(Deployer):
    """Equal numbers of GPUs for the tiers with requests; the remainder goes to the last of them."""

    def _solve(self, tables: list[LatencyTable]) -> Deployment | None:
        used = [i for i, table in enumerate(tables) if table.least_gpus]
        counts = [self.gpus // len(used) if i in used else 0 for i in range(len(tables))]
        counts[used[-1]] += self.gpus - sum(counts)
        strategies = [table.best(f) for table, f in zip(tables, counts, strict=True)]
        complete = tuple(s for s in strategies if s is not None)
        if len(complete) < len(tables):
            return None
        return Deployment(tuple(s.gpus for s in complete), complete, max(s.latency_s for s in complete))


def one_threshold(deployer: Deployer, demand: Demand, target: float) -> Sequence[float] | None:
    """The lowest common threshold that reaches the target and fits the GPUs."""
    judged = demand.judged
    for level in np.unique(np.concatenate([judged.levels(tier) for tier in range(len(TIERS) - 1)])).tolist():
        thresholds = [level] * (len(TIERS) - 1)
        if route(judged, thresholds).quality >= target and deployer.deploy(thresholds) is not None:
            return thresholds
    return None


def sites(load: float) -> Iterator[tuple[str, str, Site, Demand]]:
    base = read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")
    for family, arrivals, models in CASES:
        specs = tuple(map(model_of_catalogue, models))
        site = dataclasses.replace(base, models=specs)
        judged_at = public(family) if family else EXAMPLES / "judged.csv"
        trace_at = public(arrivals) if arrivals else EXAMPLES / "trace.csv"
        judged, trace = read_quality(judged_at, TIERS), read_trace(trace_at)
        longest = int((judged.input_tokens + judged.output_tokens[:, -1]).max())
        kinds, _ = replica_kinds(site, len(TIERS) - 1, GPUS, longest)
        lengths = float(judged.input_tokens.mean()), float(judged.output_tokens[:, -1].mean())
        rate = load * max(kind.capacity_per_s(*lengths) * (GPUS // kind.shape.gpus) for kind in kinds)
        yield (
            judged_at.name,
            trace_at.name,
            site,
            demand_of(trace, judged, requests=REQUESTS, seed=SEED, lengths="quality", rate=rate),
        )


def cell(site: Site, demand: Demand, target: float) -> dict[str, dict[str, Any]]:
    """By variant: latencies, GPUs and thresholds; empty if it cannot meet the target."""
    plain, _ = deployer_for(site, demand, gpus=GPUS, dispatch=Dispatch.CAPACITY)

    def like(other: type[Deployer]) -> Deployer:
        return other(demand.requests, demand.arrival_s, plain.kinds, GPUS)

    def solved(deployer: Deployer) -> Solution | None:
        try:
            return least_latency(deployer, target, demand.judged)
        except Unreachable:
            return None

    def row(thresholds: Sequence[float] | None, deployment: Deployment | None) -> dict[str, Any]:
        if thresholds is None or deployment is None:
            return {}
        total_s = run_cascade(site, demand, thresholds, deployment.strategies, Dispatch.CAPACITY).total_s
        return {
            "latency_p95_s": deployment.latency_s,
            "end_to_end_p95_s": float(np.percentile(total_s, 95)),
            "quality": route(demand.judged, thresholds).quality,
            "thresholds": list(thresholds),
            "gpus": list(deployment.gpus),
            "strategies": [str(strategy) for strategy in deployment.strategies],
        }

    variants = {}
    for name, deployer in (
        (WHOLE, plain),
        ("uniform parallelism", like(UniformlyParallel)),
        ("uniform allocation", like(UniformlyAllocated)),
    ):
        solution = solved(deployer)
        variants[name] = row(solution.thresholds, solution.deployment) if solution else {}
    for name, thresholds in (
        ("thresholds apart", one_threshold(plain, demand, target)),
        ("largest alone", [SKIPPED] * (len(TIERS) - 1)),
    ):
        variants[name] = row(thresholds, plain.deploy(thresholds) if thresholds is not None else None)
    return variants


def run(rounds: int) -> None:  # noqa: ARG001 -- deterministic: one round suffices
    rows: list[dict[str, Any]] = []
    for load in LOADS:
        for family, trace, site, demand in sites(load):
            for share in SHARES:
                target = demand.judged.worst + share * (demand.judged.best - demand.judged.worst)
                variants = cell(site, demand, target)
                whole_s = variants[WHOLE]["latency_p95_s"]
                about = {"family": family, "trace": trace, "load": load, "min_quality": target}
                rows.append({**about, "variants": variants})
                summary_line = "  ".join(
                    f"{n} {v['latency_p95_s'] / whole_s:.2f}x" for n, v in variants.items() if v and n != WHOLE
                )
                print(f"{family[:14]} load {load} quality {target:.1f}: {whole_s:.2f} s  {summary_line}", flush=True)
    names = [name for name in rows[0]["variants"] if name != WHOLE]

    def ratios_of(name: str, what: str) -> list[float]:
        pairs = [(row["variants"][name], row["variants"][WHOLE]) for row in rows]
        return [variant[what] / full[what] for variant, full in pairs if variant]

    summary = {
        what: {
            name: {
                "geometric_mean": math.exp(statistics.mean(map(math.log, ratios_of(name, what)))),
                "most": max(ratios_of(name, what)),
                "least": min(ratios_of(name, what)),
                "cells": len(ratios_of(name, what)),
            }
            for name in names
        }
        for what in ("latency_p95_s", "end_to_end_p95_s")
    }
    figures = {"gpus": GPUS, "requests": REQUESTS, "seed": SEED, "ratios": summary, "rows": rows}
    path = report.write("ablations", figures)
    series = {
        label: [
            (summary[what][n]["geometric_mean"], summary[what][n]["least"], summary[what][n]["most"]) for n in names
        ]
        for label, what in (("slowest tier's p95", "latency_p95_s"), ("end-to-end p95", "end_to_end_p95_s"))
    }
    title = "Latency without a part of the optimiser, over latency with it"
    plot = report.bars("ablations", title, names, series, "ratio", log=True)
    for name in names:
        latency = summary["latency_p95_s"][name]
        print(
            f"{name}: {latency['geometric_mean']:.2f}x "
            f"({latency['least']:.2f} to {latency['most']:.2f}), {latency['cells']} cells"
        )
    print(f"{path}\n{plot}")
