"""A cascade compared with one model and with a load-based cascade, on judged answers of real models and arrivals of real
traces.

Per family and quality target, all on the same GPUs:

- SLO scale: the lowest multiple of the SLO's unit within which 95 % of requests finish. The unit is the mean time of a single
  request on the largest model alone. The load is the one that this model serves with 95 % within SCALE units.
- throughput: the highest rate with 95 % within SCALE units.

Everything is planned on one half of the judged prompts and of the trace, each system for several loads. The planner's
thresholds come from PLANNED requests, which at a high rate arrive before the first is answered; so the deployment solver
also chooses replicas for these thresholds with DEPLOYED requests. Full runs on the same half select the fastest plan and the
one with the highest rate; the results are from the other half. Times are end to end, including judging. Rates are sustained:
a run lasts DURATION times the SLO, or the length of the half trace.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import cascade_systems, report
from benchmarks.cascade_systems import System
from benchmarks.public_data import public
from planner_service.demand import demand_of
from planner_service.files import ModelEntry, gpu_of_catalogue, model_of_catalogue, read_quality, read_trace
from planner_service.plan_cascade import Demand, Site, simulate_cascade
from planner_service.routing.quality import JudgedSample, route
from planner_service.simulator import Dispatch, Workload, serve
from planner_service.simulator.tier import alone_latency
from services.domain.hardware import ClusterSpec, ModelSpec

TIERS = ("small", "medium", "large")
SHARES = (0.5, 0.75, 0.95)  # of the way from the smallest model's quality to the largest's
SCALE, ATTAINED = 5.0, 0.95
LOADS = (1.0, 4.0)  # of what the largest model alone can serve: what plans are made for
DEPLOYED_AT = 3.0  # the same, for which their replicas are chosen again
PLANNED, DEPLOYED, DURATION, SEED = 400, 1500, 8.0, 5
STEPS = 9  # of a bisection over a factor of 128: to 1 %
JUDGE_S = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Judged answers of three models, the shapes that they are planned with, and the trace whose arrivals they get."""

    name: str
    quality: str
    models: tuple[str | ModelEntry, str | ModelEntry, str | ModelEntry]
    trace: str

    def specs(self) -> tuple[ModelSpec, ...]:
        return tuple(m.spec("model") if isinstance(m, ModelEntry) else model_of_catalogue(m) for m in self.models)


# Reka's sizes are published for edge (7B) and flash (21B) only: shapes of like models stand in for all three.
FLASH = ModelEntry(layers=44, hidden=6144, heads=64, kv_heads=8, head_dim=96, parameters=21)
FAMILIES = (
    Family(
        "FuseChat 1B-3B-8B",
        "quality/alpaca2_fusechat-llama_1B-3B-8B.csv.gz",
        ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"),
        "traces/servegen_m-small_sample_1h.csv.gz",
    ),
    Family(
        "Tulu 2 7B-13B-70B",
        "quality/alpaca1_tulu2-dpo_7B-13B-70B.csv.gz",
        ("llama-2-7b", "llama-2-13b", "llama-2-70b"),
        "traces/azure2023_conv.csv.gz",
    ),
    Family(
        "Reka edge-flash-core",
        "quality/wildbench_reka_edge-flash-core.csv.gz",
        ("qwen2.5-7b", FLASH, "llama-3.1-70b"),
        "traces/mooncake_conversation.csv.gz",
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Half:
    """One half of a family's data. Deterministic: the same rate gives the same requests."""

    judged: JudgedSample
    trace: Workload

    def demand(self, rate: float, requests: int) -> Demand:
        return demand_of(self.trace, self.judged, requests=requests, seed=SEED, lengths="quality", rate=rate)


def halves(family: Family) -> tuple[Half, Half]:
    judged, trace = read_quality(public(family.quality), TIERS), read_trace(public(family.trace))
    order = np.random.default_rng(SEED).permutation(len(judged))
    prompts, arrivals = np.array_split(order, 2), np.array_split(np.arange(len(trace)), 2)
    first, second = (Half(judged.subset(p), trace.subset(a)) for p, a in zip(prompts, arrivals, strict=True))
    return first, second


def run_length(half: Half, rate: float, slo_s: float) -> int:
    """Requests of a run that lasts."""
    return int(np.clip(rate * DURATION * slo_s, PLANNED, len(half.trace)))


def total_s(site: Site, half: Half, system: System, rate: float, slo_s: float) -> "np.ndarray[Any, Any]":
    """(N) seconds end to end."""
    demand = half.demand(rate, run_length(half, rate, slo_s))
    return simulate_cascade(site, demand, system.thresholds, system.strategies, Dispatch.CAPACITY)[1]


def most_per_s(site: Site, half: Half, system: System, slo_s: float, around: float) -> float:
    """The highest rate with ATTAINED within the SLO, by bisection from an eighth to sixteen times `around`."""
    low, high = around / 8, around * 16
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        attained = float((total_s(site, half, system, middle, slo_s) <= slo_s).mean()) >= ATTAINED
        low, high = (middle, high) if attained else (low, middle)
    return low


def furthest(site: Site, half: Half, systems: Sequence[System], slo_s: float, around: float) -> System:
    """The system that sustains the highest rate."""
    rates = [most_per_s(site, half, system, slo_s, around) for system in systems]
    return systems[max(range(len(rates)), key=rates.__getitem__)]


@dataclasses.dataclass(frozen=True, slots=True)
class Tuned:
    """Of the plans for several loads the fastest at the first of them, and the one that goes furthest."""

    at_load: System
    furthest: System


def measure(family: Family, shares: Sequence[float], loads: Sequence[float], planned: int) -> list[dict[str, Any]]:
    cluster = ClusterSpec(gpu_of_catalogue("a100-80gb"), nodes=2, gpus_per_node=8, node_link_bytes_per_s=25e9)
    site = Site(cluster, TIERS, family.specs(), judge_s=JUDGE_S)
    fit, held_out = halves(family)
    last = len(TIERS) - 1

    # the unit of SLOs and the load: by the largest model alone, on the half that is fitted
    idle = cascade_systems.alone(site, fit.demand(1e-3, planned), last)
    kind = idle.strategies[last].replicas[0][0]
    work = Workload(np.zeros(len(fit.judged)), fit.judged.input_tokens, fit.judged.output_tokens[:, last])
    unit_s = float(alone_latency(work, kind).mean())
    slo_s = SCALE * unit_s
    burst = serve(work, [r for r, n in idle.strategies[last].replicas for _ in range(n)])
    guess = len(work) / float(burst.finish_s.max())

    def tuned(plan: Callable[[Demand], System], base: float, deploy_again: bool = True) -> Tuned:
        systems = [plan(fit.demand(base * load, planned)) for load in loads]
        if deploy_again:
            long = fit.demand(DEPLOYED_AT * base, DEPLOYED)
            thresholds = dict.fromkeys(system.thresholds for system in systems)
            systems.extend(cascade_systems.redeployed(site, long, each) for each in thresholds)
        felt_s = [float(np.percentile(total_s(site, fit, system, base, slo_s), 100 * ATTAINED)) for system in systems]
        fastest = systems[min(range(len(systems)), key=felt_s.__getitem__)]
        return Tuned(fastest, furthest(site, fit, systems, slo_s, base))

    models = []
    for tier in range(last + 1):
        around = guess
        for _ in range(2):  # the second time at the load that the first found
            best = tuned(partial(cascade_systems.alone, site, tier=tier), around).furthest
            around = most_per_s(site, fit, best, slo_s, guess)
        models.append(Tuned(best, best))
    load = most_per_s(site, fit, models[last].furthest, slo_s, guess)
    rows = []
    for share in shares:
        target = fit.judged.worst + share * (fit.judged.best - fit.judged.worst)
        able = [tier for tier in range(last + 1) if fit.judged.scores[:, tier].mean() >= target - 1e-9]
        systems = {
            "largest": models[last],
            "single": models[able[0]],
            "load_based": tuned(partial(cascade_systems.load_based, site, min_quality=target, seed=SEED), load, False),
            "ours": tuned(partial(cascade_systems.ours, site, min_quality=target), load),
        }
        row: dict[str, Any] = {"family": family.name, "min_quality": target, "share": share}
        row |= {"unit_s": unit_s, "load_per_s": load, "single": TIERS[able[0]], "systems": {}}
        for name, system in systems.items():
            felt_s = total_s(site, held_out, system.at_load, load, slo_s)
            row["systems"][name] = {
                "slo_scale": float(np.percentile(felt_s, 100 * ATTAINED)) / unit_s,
                "requests_per_s": most_per_s(site, held_out, system.furthest, slo_s, load),
                "at_load": about(system.at_load, held_out),
                "furthest": about(system.furthest, held_out),
            }
        rows.append(row)
        line = "   ".join(
            f"{name} {result['slo_scale']:.2f}, {result['requests_per_s']:.1f}/s"
            for name, result in row["systems"].items()
        )
        print(f"{family.name}, quality {target:.1f}, {load:.1f}/s: {line}", flush=True)
    return rows


def about(system: System, half: Half) -> dict[str, Any]:
    return {
        "thresholds": [None if h > 100 else h for h in system.thresholds],
        "gpus": system.gpus,
        "replicas": [str(strategy) for strategy in system.strategies],
        "quality": route(half.judged, system.thresholds).quality,
    }


def gains(rows: Sequence[dict[str, Any]], over: str) -> dict[str, list[float]]:
    """How many times ours is better, row by row."""
    slo = [row["systems"][over]["slo_scale"] / row["systems"]["ours"]["slo_scale"] for row in rows]
    rate = [row["systems"]["ours"]["requests_per_s"] / row["systems"][over]["requests_per_s"] for row in rows]
    return {"slo_scale": slo, "throughput": rate}


def publish(rows: Sequence[dict[str, Any]], loads: Sequence[float], planned: int) -> None:
    """JSON, plots, and the means."""
    over = {name: gains(rows, name) for name in ("largest", "single", "load_based")}
    summary = {
        name: {
            what: {"mean": statistics.mean(v), "geometric_mean": statistics.geometric_mean(v), "most": max(v)}
            for what, v in values.items()
        }
        for name, values in over.items()
    }
    settings = {
        "seed": SEED,
        "scale": SCALE,
        "planned_requests": planned,
        "deployed_requests": DEPLOYED,
        "loads": list(loads),
        "judge_s": JUDGE_S,
    }
    print(report.write("cascade", {**settings, "summary": summary, "rows": rows}))
    for name, values in summary.items():
        print(name, "  ".join(f"{what} {v['mean']:.2f}x, at most {v['most']:.2f}x" for what, v in values.items()))
    groups = [f"{row['family'].split()[0]}\n{row['min_quality']:.0f}" for row in rows]
    titles = {"slo_scale": "Tighter SLO at 95 % attainment", "throughput": "More throughput at 95 % attainment"}
    for what, title in titles.items():
        series = {
            label: [(value, value, value) for value in over[name][what]]
            for name, label in (
                ("largest", "over the largest model alone"),
                ("load_based", "over a load-based cascade"),
            )
        }
        print(report.bars(f"cascade_{what}", f"{title}, by family and quality wanted", groups, series, "times"))


def run(_: int) -> None:
    """Nothing here is timed: one round is all."""
    publish([row for family in FAMILIES for row in measure(family, SHARES, LOADS, PLANNED)], LOADS, PLANNED)


def run_quick(_: int) -> None:
    """One target."""
    publish([row for family in FAMILIES for row in measure(family, SHARES[1:2], LOADS, PLANNED)], LOADS, PLANNED)
