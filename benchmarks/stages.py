"""Replay of recorded traces on 16 simulated instances: length stages compared with other methods (CascadeInfer, 6).

Requests have the trace's lengths, in its order, and arrive as a Poisson process (section 6.1). Layouts are planned on the
first half of the trace and replayed on the second. Contenders: round robin; dispatch and migration by free memory, after
Llumnix; no pipeline (one stage with bid-ask); a chain of one instance per stage; stages. Ablations: other refinements, and
bid-ask between stages only. Instances are the worker's batch scheduler on a roofline of a GPU; placement, refinement and
bidding are the production code. The slow-down of attention over different lengths by up to 2.1 times is from the paper's
figure 2 and not measured here, so the heaviest load is also replayed without it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import report
from benchmarks.public_data import public
from planner_service.files import read_replica, read_trace
from planner_service.profiles import qoe_errors
from planner_service.simulator import Workload
from planner_service.simulator.cluster import (
    Cluster,
    ClusterServed,
    MemoryAware,
    Moves,
    Policy,
    Refinement,
    RoundRobin,
    Staged,
    serve_cluster,
)
from planner_service.stages import (
    LengthSample,
    Method,
    MoveCost,
    batches_of,
    count_in_flight,
    exponential_cuts,
    in_flight,
    plan_stages,
)
from planner_service.stages.partition import Problem
from services.domain.stages import QoeModel, StageLayout

TRACES = ("mooncake_conversation", "azure2023_conv")
MODEL, GPU, INSTANCES = "llama-3.2-3b", "h100", 16
BANDWIDTH_BYTES_PER_S = 25e9  # of a 200 Gbit/s link
MIXED = 1.1  # figure 2: up to 2.1 times
MIN_GAIN = 0.2  # one stage is kept for less: about the QoE model's own error on these requests
LOADS = {"light": 0.3, "medium": 0.6, "heavy": 0.8, "full": 1.0}  # of what the roofline says 16 instances carry
REQUESTS = {"mooncake_conversation": 3000, "azure2023_conv": 9000}
SEED = 1

Contenders = dict[str, Callable[[Cluster], Policy]]


def contenders(layout: StageLayout, chain: StageLayout | None, qoe: QoeModel) -> Contenders:
    """By name; the chain where there is one."""
    top = layout.max_tokens
    policies: Contenders = {
        "round robin": RoundRobin,
        "memory-aware": MemoryAware,
        "no pipeline": lambda c: Staged(c, StageLayout.single(INSTANCES, top), qoe),
        "stages": lambda c: Staged(c, layout, qoe),
        "stages, no refinement": lambda c: Staged(c, layout, qoe, Refinement.NONE),
        "stages, quantity refinement": lambda c: Staged(c, layout, qoe, Refinement.QUANTITY),
        "stages, memory refinement": lambda c: Staged(c, layout, qoe, Refinement.MEMORY),
        "stages, inter-stage only": lambda c: Staged(c, layout, qoe, within_stages=False),
    }
    if chain is not None:
        policies["chain"] = lambda c: Staged(c, chain, qoe)
    return policies


def figures_of(work: Workload, served: ClusterServed, layout: StageLayout) -> dict[str, float]:
    """Times in seconds. imbalance: coefficient of variation of output tokens by instance, mean over the stages."""
    ttft = served.first_s - work.arrival_s
    several = work.output_tokens > 1
    tpot = (served.finish_s - served.first_s)[several] / (work.output_tokens[several] - 1)
    produced, at, spread = served.produced.astype(float), 0, []
    for stage in layout.stages:
        part, at = produced[at : at + stage.instances], at + stage.instances
        if len(part) > 1 and part.sum() > 0:
            spread.append(float(part.std() / part.mean()))
    return {
        "ttft_mean": float(ttft.mean()),
        "ttft_p95": float(np.percentile(ttft, 95)),
        "tpot_mean": float(tpot.mean()),
        "tpot_p95": float(np.percentile(tpot, 95)),
        "tokens_per_s": served.tokens_by_horizon / served.horizon_s,
        "moved": served.moved,
        "moves_failed": served.failed_moves,
        "moved_tokens": served.moved_tokens,
        "imbalance": float(np.mean(spread)) if spread else 0.0,
    }


def at_rate(work: Workload, rate: float) -> Workload:
    """The trace's requests, arriving as a Poisson process."""
    gaps = np.random.default_rng(SEED).exponential(1 / rate, len(work))
    arrivals = np.cumsum(gaps)
    return Workload(arrivals - arrivals[0], work.input_tokens, work.output_tokens)


def replay(name: str) -> dict[str, Any]:
    """All loads and contenders of one trace."""
    work = read_trace(public(f"traces/{name}.csv.gz"))
    half = len(work) // 2
    past = work.subset(np.arange(half))
    future = work.subset(np.arange(half, min(len(work), half + REQUESTS[name])))
    measured, top = read_replica(None, MODEL, GPU, past), work.longest_tokens + 1
    batches = batches_of(measured.replica, past)
    fit_error = float(np.abs(qoe_errors(measured.qoe, batches)).mean())
    move = MoveCost(measured.kv_bytes_per_token, BANDWIDTH_BYTES_PER_S)
    means = float(future.input_tokens.mean()), float(future.output_tokens.mean())
    capacity = INSTANCES * measured.replica.capacity_per_s(*means)
    print(f"{name}: {capacity:.1f} requests/s by the roofline, QoE fit {fit_error:.1%}", flush=True)
    cells: dict[str, Any] = {}
    for load, share in LOADS.items():
        rate = share * capacity
        arriving = at_rate(future, rate)
        count = count_in_flight(at_rate(past, rate), measured.qoe, INSTANCES, measured.replica)
        sample = in_flight(past, count)
        planned = plan_stages(sample, measured.qoe, INSTANCES, top, move, min_gain=MIN_GAIN)
        problem = Problem(sample, measured.qoe, INSTANCES, move, exponential_cuts(top))
        parts = problem.chain()
        chain = None if parts is None else problem.layout(parts)
        cell: dict[str, Any] = {
            "rate_per_s": rate,
            "planned_in_flight": count,
            "stages": [[s.from_tokens, s.to_tokens, s.instances] for s in planned.layout.stages],
            "predicted_gain": 1 - planned.quality / planned.one_stage_quality,
            "contenders": {},
        }
        runs = [(kind, policy, MIXED) for kind, policy in contenders(planned.layout, chain, measured.qoe).items()]
        if load == "heavy":
            runs += [
                (f"{kind}, lengths free", policy, 0.0) for kind, policy, _ in runs if kind in ("round robin", "stages")
            ]
        for kind, policy, mixed in runs:
            moves = Moves(measured.kv_bytes_per_token, BANDWIDTH_BYTES_PER_S, mixed)
            served = serve_cluster(arriving, measured.replica, INSTANCES, moves, policy)
            cell["contenders"][kind] = figures = figures_of(arriving, served, planned.layout)
            if kind == "stages":
                cell["boundaries"] = served.boundaries
            print(
                f"  {load:<6} {kind:<28} TTFT {figures['ttft_mean']:7.3f} p95 {figures['ttft_p95']:7.3f} s  TPOT "
                f"{1000 * figures['tpot_mean']:6.2f} p95 {1000 * figures['tpot_p95']:6.2f} ms  "
                f"{figures['tokens_per_s']:8,.0f} tok/s  moved {figures['moved']:.0f}",
                flush=True,
            )
        cell["against"] = {
            kind: {
                "ttft_lower": 1 - cell["contenders"]["stages"]["ttft_mean"] / figures["ttft_mean"],
                "tpot_lower": 1 - cell["contenders"]["stages"]["tpot_mean"] / figures["tpot_mean"],
                "throughput": cell["contenders"]["stages"]["tokens_per_s"] / figures["tokens_per_s"],
            }
            for kind, figures in cell["contenders"].items()
            if kind != "stages" and "lengths free" not in kind
        }
        cells[load] = cell
    return {"requests": len(future), "capacity_per_s": capacity, "qoe_fit_error": fit_error, "loads": cells}


def partition_times(rounds: int) -> dict[str, Any]:
    """Best of `rounds` (after one that compiles), seconds: the exact answer and the heuristic, with its gap."""
    work = read_trace(public("traces/mooncake_conversation.csv.gz"))
    qoe = read_replica(None, MODEL, GPU, work).qoe
    move, times_by_instances = MoveCost(114_688, BANDWIDTH_BYTES_PER_S), dict[str, Any]()
    work = work.subset(work.input_tokens + work.output_tokens < 131_072)
    for instances, per_instance in ((16, 40), (128, 40), (1024, 40)):
        sample = in_flight(work, instances * per_instance)
        times = {
            method: min(_timed(sample, qoe, instances, move, method) for _ in range(rounds + 1))
            for method in (Method.EXACT, Method.HEURISTIC)
        }
        gap = plan_stages(sample, qoe, instances, 131_072, move, Method.HEURISTIC).gap
        times_by_instances[str(instances)] = {
            "exact_s": times[Method.EXACT],
            "heuristic_s": times[Method.HEURISTIC],
            "heuristic_gap": gap,
            "sequences": len(sample),
        }
        print(
            f"{instances:>5} instances, 128K: exact {1000 * times[Method.EXACT]:.1f} ms, heuristic "
            f"{1000 * times[Method.HEURISTIC]:.1f} ms, {gap:.1%} above the exact answer",
            flush=True,
        )
    return times_by_instances


def _timed(sample: LengthSample, qoe: QoeModel, instances: int, move: MoveCost, method: Method) -> float:
    began = time.perf_counter()
    problem = Problem(sample, qoe, instances, move, exponential_cuts(131_072))
    problem.layout(problem.exact() if method is Method.EXACT else problem.heuristic())
    return time.perf_counter() - began


def run(rounds: int) -> None:
    """`rounds` is how often partitions are timed; replays are deterministic."""
    partition = partition_times(rounds)
    replays = {name: replay(name) for name in TRACES}
    about = {
        "seed": SEED,
        "model": MODEL,
        "gpu": f"{GPU}, by its data sheet",
        "instances": INSTANCES,
        "bandwidth_bytes_per_s": BANDWIDTH_BYTES_PER_S,
        "mixed": MIXED,
        "mixed_from": "CascadeInfer, figure 2; not measured",
        "min_gain": MIN_GAIN,
        "published_over_round_robin": {"ttft_lower": [0.67, 0.78], "tpot_lower": [0.30, 0.64], "throughput": 1.99},
    }
    path = report.write("stages", {**about, "partition": partition, "replays": replays})
    plot = _plot(replays)
    for name, replayed in replays.items():
        for load, cell in replayed["loads"].items():
            over = cell["against"]["round robin"]
            print(
                f"{name} {load}: {len(cell['stages'])} stages; over round robin TTFT {-over['ttft_lower']:+.0%}, TPOT "
                f"{-over['tpot_lower']:+.0%}, throughput {over['throughput']:.2f}x"
            )
    print(f"{path}\n{plot}")


def _plot(replays: dict[str, Any]) -> Path:
    """Mean TTFT and TPOT by load for the first trace, and its boundaries over time at heavy load."""
    loads = replays[TRACES[0]]["loads"]
    kinds = [
        k
        for k in ("round robin", "memory-aware", "no pipeline", "chain", "stages")
        if k in loads["heavy"]["contenders"]
    ]
    figure, (ttft, tpot, cuts) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for axes, what, scale, unit in ((ttft, "ttft_mean", 1, "mean TTFT, s"), (tpot, "tpot_mean", 1000, "mean TPOT, ms")):
        for colour, kind in zip(report.COLOURS, kinds, strict=False):
            values = [scale * cell["contenders"][kind][what] for cell in loads.values()]
            axes.plot(range(len(loads)), values, "o-", color=colour, label=kind)
        axes.set_xticks(range(len(loads)), [f"{load}\n{cell['rate_per_s']:.0f}/s" for load, cell in loads.items()])
        axes.set_ylabel(unit)
        axes.set_yscale("log")
    tpot.legend(frameon=False)
    series = loads["heavy"]["boundaries"]
    for i in range(len(series[0][1]) if series else 0):
        cuts.plot([at for at, _ in series], [values[i] for _, values in series], color=report.COLOURS[i % 5])
    cuts.set_yscale("log")
    cuts.set_xlabel("simulated time at heavy load, s")
    cuts.set_ylabel("stage boundaries, tokens")
    for axes in (ttft, tpot, cuts):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{INSTANCES} instances, {TRACES[0]}: {MODEL} on {GPU} (simulated)", x=0.01, ha="left")
    path = report.RESULTS / "stages.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
