"""Three workloads in turn, 8, 16 and 10 minutes of virtual time: one plan throughout, against planning again on drift.

Arrivals are stretches of three public traces, each at a rate of its own. Prompts come from WildBench, judged on three tiers;
the phases draw from them with unlike difficulty. Half of the prompts are the stored sample that plans are made with, the
other half is the traffic: what re-planning knows of that is what routers would have sampled, 50 requests a window, with
scores of the tiers they visited only. The drift rule, the borrowing of scores and the planner are the planner service's.

Moving over, as `penstock up` does it: the old replicas serve until the new ones have loaded (LOAD_S), which needs room for
both. Running requests start again, so no GPU is counted twice. `known` plans each phase beforehand, from its
own traffic, and moves over as it begins. Each round draws other traffic, with the next seed.

Baselines (CASCADIA, figure 11), on the same GPUs: the largest model alone and the load-based cascade of `cascade_systems`,
each once for the first phase and for each phase known beforehand; neither plans again by itself.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import cascade_systems, report
from benchmarks.cascade_systems import System
from benchmarks.public_data import public
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.live.rescheduling import Drift, DriftState, observe, rate_per_s
from penstock.planner_service.manifests.mesh_tiers import mesh_tiers
from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.planning.plan_cascade import plan_cascade
from penstock.planner_service.question.demand import demand_of
from penstock.planner_service.question.imputation import imputed
from penstock.planner_service.question.planning_options import Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.quality import SKIPPED, JudgedSample, route
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import Dispatch, Workload
from penstock.planner_service.simulator.workload import Bools, Floats, Ints
from penstock.services.domain.workload import PARTS, RequestRecord, TierVisit, Window
from penstock.types.planning import Objective
from tests.support.inputs import read_quality, read_site

TIERS = ("small", "medium", "large")
MIN_QUALITY = 62.0
OPTIONS = Options(min_quality=MIN_QUALITY, objective=Objective.LARGEST_TIER, allow_overload=True)
REQUESTS, PROMPTS = 300, 300  # to plan for; drawn from sampled requests
SAMPLE = 50
WINDOWS_S = (60.0, 300.0)
LOAD_S = 60.0
SEED = 1


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of the day. ease: 0 draws prompts evenly, above draws the easier ones more often (standard deviations)."""

    minutes: int
    trace: str
    rate_per_s: float
    ease: float


PHASES = (
    Phase(8, "azure2023_conv", 15.0, 0.0),
    Phase(16, "servegen_m-small_sample_1h", 60.0, 1.0),
    Phase(10, "mooncake_conversation", 4.0, -0.5),
)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """By request: the tier-wise outcome of a whole run. total_s: from arrival to answer; score: of the accepted answer."""

    total_s: Floats
    score: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """From `at_s` on, requests are served by this system."""

    at_s: float
    system: System


def followed(plan: CascadePlan) -> System:
    """The plan as the mesh follows it: see mesh_tiers."""
    strategies = tuple(tier.strategy for tier in plan.tiers)
    per_tier = mesh_tiers(plan.thresholds, [strategy.gpus for strategy in strategies])
    return System(tuple(SKIPPED if h is None or not gpus else h for h, gpus in per_tier[:-1]), strategies)


def traffic(judged: JudgedSample, seed: int) -> Demand:
    """All requests of the phases."""
    rng = np.random.default_rng(seed)
    mean = judged.scores.mean(axis=1)
    ease = (mean - mean.mean()) / mean.std()
    rows, arrivals, began = list[Ints](), list[Floats](), 0.0
    for phase in PHASES:
        seconds = phase.minutes * 60.0
        trace = read_trace(public(f"traces/{phase.trace}.csv.gz"))
        count = min(len(trace) - 1, round(phase.rate_per_s * seconds))
        start = int(rng.integers(0, len(trace) - count))
        at = trace.arrival_s[start : start + count + 1] - trace.arrival_s[start]
        at = at[:-1] * (seconds / at[-1])  # the stretch of the trace, at the phase's own rate
        weight = np.exp(phase.ease * ease)
        rows.append(rng.choice(len(judged), len(at), p=weight / weight.sum()))
        arrivals.append(began + at)
        began += seconds
    chosen = np.concatenate(rows)
    return Demand(judged, judged.subset(chosen), np.concatenate(arrivals))


def serve(site: Site, demand: Demand, moves: Sequence[Move]) -> Served:
    """A run under the first plan, then under each next one from its time on; running requests start again."""
    total_s, score = np.full(len(demand.arrival_s), np.nan), np.zeros(len(demand.arrival_s))
    waiting = np.zeros(0, np.int64)  # begun before the plan at hand, not finished
    for move, following in zip(moves, [*moves[1:], None], strict=True):
        until = following.at_s if following is not None else np.inf
        fresh = np.flatnonzero((demand.arrival_s >= move.at_s) & (demand.arrival_s < until))
        indices = np.concatenate([waiting, fresh])
        if not len(indices):
            continue
        begins = np.maximum(demand.arrival_s[indices], move.at_s)
        part = Demand(demand.judged, demand.requests.subset(indices), begins)
        system = move.system
        took_s = run_cascade(site, part, system.thresholds, system.strategies, Dispatch.CAPACITY).total_s
        done = begins + took_s <= until
        total_s[indices] = begins + took_s - demand.arrival_s[indices]
        answered = route(part.requests, system.thresholds).answered
        score[indices] = part.requests.scores[np.arange(len(indices)), answered]
        waiting = indices[~done]
    return Served(total_s, score)


def sampled(demand: Demand, begin_s: float, seconds: float, thresholds: Sequence[float], rng: Any) -> Window:
    """What routers would report of a window."""
    indices = np.flatnonzero((demand.arrival_s >= begin_s) & (demand.arrival_s < begin_s + seconds))
    counts, _ = np.histogram(demand.arrival_s[indices], PARTS, (begin_s, begin_s + seconds))
    chosen = rng.choice(indices, min(SAMPLE, len(indices)), replace=False)
    part = demand.requests.subset(chosen)
    processed = route(part, thresholds).processed if len(chosen) else np.zeros((len(TIERS), 0), bool)
    records = []
    for i, row in enumerate(chosen.tolist()):
        visits = tuple(
            TierVisit(tier, int(part.output_tokens[i, t]), float(part.scores[i, t]) if t < len(TIERS) - 1 else None)
            for t, tier in enumerate(TIERS)
            if processed[t, i]
        )
        weight = len(indices) / len(chosen)
        records.append(RequestRecord(float(demand.arrival_s[row]), int(part.input_tokens[i]), visits, weight))
    return Window(begin_s, seconds, tuple(int(n) for n in counts), tuple(records))


def replanned(
    site: Site, demand: Demand, stored: JudgedSample, trace: Workload, first: CascadePlan, window_s: float
) -> tuple[list[Move], list[dict[str, Any]]]:
    """(the plans followed, what was decided and when), the rule being fed window after window."""
    rng, state = np.random.default_rng(SEED), DriftState()
    moves, decisions = [Move(0.0, followed(first))], list[dict[str, Any]]()
    ends = np.arange(window_s, demand.arrival_s[-1] + 1e-9, window_s)
    for end_s in ends.tolist():
        in_force = [m for m in moves if m.at_s <= end_s - window_s / 2][-1]
        window = sampled(demand, end_s - window_s, window_s, in_force.system.thresholds, rng)
        state, drift = observe(state, window)
        if drift is None:
            continue
        began = time.perf_counter()
        plan = _plan_again(site, stored, trace, drift)
        took_s = time.perf_counter() - began
        entry = {"at_s": end_s, "shifts": [str(s) for s in drift.shifts], "planning_s": took_s}
        decisions.append(entry | ({"unreachable": True} if plan is None else _expected(plan)))
        if plan is not None:
            moves.append(Move(end_s + took_s + LOAD_S, followed(plan)))
    return moves, decisions


def _plan_again(site: Site, stored: JudgedSample, trace: Workload, drift: Drift) -> CascadePlan | None:
    records = [record for window in drift.evidence for record in window.records]
    judged = imputed(stored, records, PROMPTS, SEED)
    try:
        return _plan(site, trace, judged, rate_per_s(drift.evidence))
    except Unreachable:
        return None


def _about(system: System) -> dict[str, Any]:
    return {"thresholds": [None if h > 100 else h for h in system.thresholds], "gpus": system.gpus}


def _expected(plan: CascadePlan) -> dict[str, Any]:
    figures = {"quality": plan.quality, "end_to_end_p95_s": plan.end_to_end_p95_s}
    return _about(followed(plan)) | {"expected": figures}


def _figures(served: Served, demand: Demand, slo_s: float) -> dict[str, dict[str, float]]:
    """Of each phase, of its second half (after a new plan should be in use), and of the whole."""
    figures, begins, at = dict[str, dict[str, float]](), 0.0, demand.arrival_s
    for number, phase in enumerate(PHASES, 1):
        ends = begins + 60.0 * phase.minutes
        figures[f"phase {number}"] = _of(served, (at >= begins) & (at < ends), slo_s)
        figures[f"phase {number}, second half"] = _of(served, (at >= (begins + ends) / 2) & (at < ends), slo_s)
        begins = ends
    return figures | {"all": _of(served, at >= 0, slo_s)}


def _of(served: Served, indices: Bools, slo_s: float) -> dict[str, float]:
    p50, p95 = np.percentile(served.total_s[indices], (50, 95))
    return {
        "requests": int(indices.sum()),
        "p50_s": float(p50),
        "p95_s": float(p95),
        "quality": float(served.score[indices].mean()),
        "slo_attainment": float((served.total_s[indices] <= slo_s).mean()),
    }


def run(rounds: int) -> None:
    site = read_site(Path("examples/cluster-4x8-h100.yaml"), Path("examples/deepseek-cascade.yaml"))
    prompts = read_quality(public("quality/wildbench_reka_edge-flash-core.csv.gz"), TIERS)
    prompts = prompts.subset(np.flatnonzero((prompts.output_tokens > 1).all(axis=1)))
    order = np.random.default_rng(SEED).permutation(len(prompts))
    stored, served_prompts = prompts.subset(order[::2]), prompts.subset(order[1::2])
    trace = read_trace(public("traces/azure2023_conv.csv.gz"))
    first = _plan(site, trace, stored, PHASES[0].rate_per_s)
    slo_s = 2 * first.end_to_end_p95_s
    all_rows, records, plot = list[dict[str, Any]](), list[dict[str, Any]](), None
    for seed in range(SEED, SEED + rounds):
        demand = traffic(served_prompts, seed)
        runs, decisions = {"one plan": [Move(0.0, followed(first))]}, dict[str, Any]()
        for window_s in WINDOWS_S:
            name = f"planned again, windows of {window_s:.0f} s"
            runs[name], decisions[name] = replanned(site, demand, stored, trace, first, window_s)
        runs["known"], begins = [], 0.0
        for name, choose in BASELINES.items():
            runs[name] = [Move(0.0, choose(site, _demand(trace, stored, PHASES[0].rate_per_s)))]
            runs[f"{name}, known"] = []
        for phase in PHASES:
            ends = begins + 60.0 * phase.minutes
            indices = np.flatnonzero((demand.arrival_s >= begins) & (demand.arrival_s < ends))
            of_phase = _demand(trace, demand.requests.subset(indices), phase.rate_per_s)
            runs["known"].append(Move(begins, followed(plan_cascade(site, of_phase, OPTIONS))))
            for name, choose in BASELINES.items():
                runs[f"{name}, known"].append(Move(begins, choose(site, of_phase)))
            begins = ends
        served = {name: serve(site, demand, moves) for name, moves in runs.items()}
        rows = {name: _figures(outcome, demand, slo_s) for name, outcome in served.items()}
        all_rows.append(rows)
        plans = {name: [{"from_s": m.at_s, **_about(m.system)} for m in moves] for name, moves in runs.items()}
        records.append({"seed": seed, "plans": plans, "decisions": decisions})
        plot = plot or _plot({n: one for n, one in served.items() if n not in UNPLOTTED}, demand.arrival_s, runs)
        print(f"seed {seed}: {', '.join(f'{n}: {len(moves)} plans' for n, moves in runs.items())}", flush=True)
    for name in all_rows[0]:
        for part in all_rows[0][name]:
            mean = {key: float(np.mean([rows[name][part][key] for rows in all_rows])) for key in ("p95_s", "quality")}
            within = float(np.mean([rows[name][part]["slo_attainment"] for rows in all_rows]))
            line = f"p95 {mean['p95_s']:7.1f} s, quality {mean['quality']:.1f}, within {slo_s:.1f} s {within:.0%}"
            print(f"{name:>34} {part}: {line}")
    path = report.write(
        "drift",
        {
            "seeds": [SEED, SEED + rounds - 1],
            "data": "WildBench (reka edge, flash, core), Azure 2023, ServeGen m-small, Mooncake",
            "phases": [dataclasses.asdict(phase) for phase in PHASES],
            "min_quality": MIN_QUALITY,
            "slo_s": slo_s,
            "load_s": LOAD_S,
            "runs": records,
            "rows": all_rows,
        },
    )
    print(f"{path}\n{plot}")


def _plan(site: Site, trace: Workload, judged: JudgedSample, rate: float) -> CascadePlan:
    return plan_cascade(site, _demand(trace, judged, rate), OPTIONS)


def _demand(trace: Workload, judged: JudgedSample, rate: float) -> Demand:
    return demand_of(trace, judged, requests=REQUESTS, seed=SEED, lengths="quality", rate=rate)


def _largest(site: Site, demand: Demand) -> System:
    return cascade_systems.alone(site, demand, len(TIERS) - 1)


def _load_based(site: Site, demand: Demand) -> System:
    return cascade_systems.load_based(site, demand, MIN_QUALITY, SEED)


BASELINES = {"largest": _largest, "load-based": _load_based}
UNPLOTTED = ("largest, known", "load-based, known")


def _plot(served: dict[str, Served], arrival_s: Floats, runs: dict[str, list[Move]]) -> Path:
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    minutes = np.arange(int(arrival_s[-1] // 60) + 1)
    for (name, outcome), colour in zip(served.items(), report.COLOURS, strict=False):
        within = [outcome.total_s[(arrival_s >= 60 * m) & (arrival_s < 60 * (m + 1))] for m in minutes]
        scores = [outcome.score[(arrival_s >= 60 * m) & (arrival_s < 60 * (m + 1))] for m in minutes]
        style = ":" if name == "known" else "-"
        above.plot(minutes, [np.percentile(x, 95) for x in within], style, color=colour, label=name)
        below.plot(minutes, [x.mean() for x in scores], style, color=colour)
        for move in runs[name][1:] if name != "known" else []:
            above.axvline(move.at_s / 60, color=colour, linewidth=0.8, linestyle="--")
    below.axhline(MIN_QUALITY, color="#333333", linewidth=0.8, linestyle="--")
    for axes in (above, below):
        for number in range(1, len(PHASES)):
            axes.axvline(sum(p.minutes for p in PHASES[:number]), color="#bbbbbb", linewidth=1, zorder=0)
    above.set_yscale("log")
    above.set_ylabel("p95 from arrival to answer (s)")
    above.set_title("Three workloads in turn", loc="left")
    above.legend(frameon=False, fontsize=8)
    below.set_ylabel("mean judge score")
    below.set_xlabel("minute of arrival")
    return report.save("drift", figure)
