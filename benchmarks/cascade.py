"""A cascade compared with one model and with a load-based cascade, on judged answers of real models and arrivals of real
traces.

Per family, quality target and split of the data, all on the same GPUs:

- SLO scale: the lowest multiple of the SLO's unit within which 95 % of requests finish. The unit is the mean time of a single
  request on the largest model alone. The load is the one that this model serves with 95 % within SCALE units, and SWEEP times
  as much.
- throughput: the highest rate with 95 % within SCALE units.
- attainment at the load within SCALES units (CASCADIA, figure 7), and each tier's own p95 (figure 8).

Everything is planned on one half of the judged prompts and of the trace, each system for several loads. Plans are made
for as many requests as come in HORIZON times the SLO's unit, within PLANNED. Each system is planned again at the highest
rate that its plans serve, up to AGAIN times as long as that rate grows, and the deployment solver also chooses replicas for
its thresholds there. Full runs on the same half, DRAWS of them, select the fastest plan and the one with the highest rate;
the results are from the other half. Times are end to end,
including judging. Rates are sustained: a run lasts at least DURATION times the SLO, for which arrivals are repeated where
the half trace is shorter.

Every split draws which prompts and which half of the trace are fitted. Figures are means over splits with their intervals
(Student's t), of ratios on a logarithmic scale.

`largest_chunked` is the largest model alone with the chunk of prompts that is best for it, of CHUNKS tokens in a step: what
Sarathi-Serve does (table 4). `load_based_deployed` has the load-based cascade's thresholds and the deployment solver's
replicas, solved for as many loads as `planned` is: so its gain over `load_based` is that of the deployment, and the gain of
`planned` over it that of thresholds and deployment found together. `planned` is the planner's plan by thresholds alone.
`planned_long` may also have rules for long answers: plans with them are made for the load and for the rate that `planned`
reaches, as each takes several plans. `planned_best` may also have replies that are the best answers of requests, in plans
that are made likewise. `ours` may also begin where another system ends: it is the best of these and of `load_based_deployed`
on the half that is fitted.
"""

import dataclasses
import functools
import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import cascade_systems, report
from benchmarks.cascade_systems import System
from benchmarks.public_data import public
from benchmarks.spread import interval
from penstock.planner_service.files.hardware import gpu_of_catalogue, model_spec
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.question.demand import demand_of
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.simulator import Dispatch, Workload, serve
from penstock.planner_service.simulator.tier import alone_times
from penstock.planner_service.simulator.workload import Floats
from penstock.services.domain.hardware import ClusterSpec, ModelSpec
from penstock.types.planning import Model
from penstock.types.simulated import SimulatedTier
from tests.support.inputs import read_quality

TIERS = ("small", "medium", "large")
SHARES = (0.5, 0.75, 0.95)  # of the way from the smallest model's quality to the largest's
SCALE, ATTAINED = 5.0, 0.95
LOADS = (1.0, 2.0, 4.0)  # of what the largest model alone can serve: what plans are made for
SWEEP = (1.0, 1.15, 1.3)  # of the load, at which SLO scales are measured
HORIZON, PLANNED, DURATION = 20.0, (500, 6000), 8.0
SPLITS = (1, 2, 3, 4, 5)
AGAIN, GROWS = 3, 1.01
DRAWS = (0, 1000)  # added to the seed: runs with other stretches and prompts, by whose means plans are selected
STEPS, ROUGH_STEPS = 9, 7  # of a bisection over a factor of 128: to 1 %; to 4 % where plans are selected
JUDGE_S = 0.1
BASELINES = (
    *("largest", "largest_chunked", "single", "load_based", "load_based_deployed"),
    *("planned", "planned_long", "planned_best"),
)
NO_WORSE = 0.98
SCALES = (0.5, 0.75, *(float(x) for x in np.arange(1.0, 8.1, 0.5)))
CHUNKS = (256, 512, 1024, 4096, 8192)  # tokens; the other systems have 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Judged answers of three models, the shapes that they are planned with, and the trace whose arrivals they get."""

    name: str
    quality: str
    models: tuple[str | Model, str | Model, str | Model]
    trace: str

    def specs(self) -> tuple[ModelSpec, ...]:
        return tuple(model_spec(Model(m) if isinstance(m, str) else m, "model") for m in self.models)


# Reka's sizes are published for edge (7B) and flash (21B) only: shapes of like models replace all three.
FLASH = Model(name="model", layers=44, hidden=6144, heads=64, kv_heads=8, head_dim=96, parameters=21)
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
    """One half of a family's data. Deterministic: the same rate and number of requests give the same requests."""

    judged: JudgedSample
    trace: Workload
    seed: int

    def demand(self, rate: float, requests: int) -> Demand:
        arrivals = repeated(self.trace, requests)
        return demand_of(arrivals, self.judged, requests=requests, seed=self.seed, lengths="quality", rate=rate)


def repeated(trace: Workload, requests: int) -> Workload:
    """The trace, one after another as often as `requests` wants."""
    times = math.ceil(requests / len(trace))
    period_s = trace.arrival_s[-1] - trace.arrival_s[0] + 1 / trace.rate_per_s
    arrival_s = (np.arange(times)[:, None] * period_s + trace.arrival_s[None]).ravel()
    return Workload(arrival_s, np.tile(trace.input_tokens, times), np.tile(trace.output_tokens, times))


def halves(family: Family, split: int) -> tuple[Half, Half]:
    """What is fitted, and what is reported on."""
    judged, trace = read_quality(public(family.quality), TIERS), read_trace(public(family.trace))
    rng = np.random.default_rng(split)
    prompts = np.array_split(rng.permutation(len(judged)), 2)
    arrivals = rng.permutation(2)
    parts = np.array_split(np.arange(len(trace)), 2)
    first, second = (
        Half(judged.subset(p), trace.subset(parts[i]), split) for p, i in zip(prompts, arrivals, strict=True)
    )
    return first, second


def run_length(rate: float, slo_s: float) -> int:
    """Requests of a run that lasts."""
    return max(PLANNED[0], math.ceil(rate * DURATION * slo_s))


def run_of(
    site: Site, half: Half, system: System, rate: float, slo_s: float
) -> tuple[tuple[SimulatedTier, ...], Floats]:
    """(each tier's report, (N) seconds end to end)."""
    demand = half.demand(rate, run_length(rate, slo_s)).under(system.rules)
    run = run_cascade(site, demand, system.thresholds, system.strategies, Dispatch.CAPACITY)
    return run.reports, run.total_s


def total_s(site: Site, half: Half, system: System, rate: float, slo_s: float) -> Floats:
    """(N) seconds end to end."""
    return run_of(site, half, system, rate, slo_s)[1]


def most_per_s(site: Site, half: Half, system: System, slo_s: float, around: float, steps: int = STEPS) -> float:
    """The highest rate with ATTAINED within the SLO, by bisection over a factor of 128 about `around`, and beyond that where
    it is not there; 0 where not even a request alone is fast enough."""

    def attained(rate: float) -> bool:
        return float((total_s(site, half, system, rate, slo_s) <= slo_s).mean()) >= ATTAINED

    low, high = around / 8, around * 16
    while not attained(low):
        low, high = low / 16, low
        if low < around / 1e4:
            return 0.0
    while attained(high):
        low, high = high, high * 16
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if attained(middle) else (low, middle)
    return low


@dataclasses.dataclass(frozen=True, slots=True)
class Tuned:
    """Of the plans for several loads the fastest at the first of them, and the one that goes furthest, with its rate."""

    at_load: System
    furthest: System
    rate_per_s: float
    systems: tuple[System, ...]  # that it was chosen from


def site_of(family: Family) -> Site:
    cluster = ClusterSpec(gpu_of_catalogue("a100-80gb"), nodes=2, gpus_per_node=8, node_link_bytes_per_s=25e9)
    return Site(cluster, TIERS, family.specs(), judge_s=JUDGE_S)


def measure(family: Family, split: int, shares: Sequence[float]) -> list[dict[str, Any]]:
    """The rows of one family and one split: one for each quality target."""
    site = site_of(family)
    fit, held_out = halves(family, split)
    last = len(TIERS) - 1

    # the unit of SLOs and the load: by the largest model alone, on the half that is fitted
    idle = cascade_systems.alone(site, fit.demand(1e-3, PLANNED[0]), last)
    kind = idle.strategies[last].replicas[0][0]
    work = Workload(np.zeros(len(fit.judged)), fit.judged.input_tokens, fit.judged.output_tokens[:, last])
    unit_s = float(alone_times(work, kind).finish_s.mean())
    slo_s = SCALE * unit_s
    burst = serve(work, [r for r, n in idle.strategies[last].replicas for _ in range(n)])
    guess = len(work) / float(burst.finish_s.max())

    @functools.cache
    def rated(system: System, base: float) -> tuple[float, float]:
        """Seconds at the load `base`, and the highest rate: geometric means over DRAWS."""
        drawn = [dataclasses.replace(fit, seed=fit.seed + more) for more in DRAWS]
        felt_s = [float(np.percentile(total_s(site, half, system, base, slo_s), 100 * ATTAINED)) for half in drawn]
        rates = [most_per_s(site, half, system, slo_s, base, ROUGH_STEPS) for half in drawn]
        return statistics.geometric_mean(felt_s), statistics.geometric_mean(rates) if all(rates) else 0.0

    def selected(systems: Sequence[System], base: float) -> Tuned:
        felt_s, rates = zip(*(rated(system, base) for system in systems), strict=True)
        fastest = systems[min(range(len(systems)), key=felt_s.__getitem__)]
        best = max(range(len(rates)), key=rates.__getitem__)
        return Tuned(fastest, systems[best], rates[best], tuple(systems))

    def demand(rate: float) -> Demand:
        return fit.demand(rate, int(np.clip(HORIZON * unit_s * rate, *PLANNED)))

    def redeployed(systems: Sequence[System], rate: float) -> list[System]:
        """The same thresholds with the deployment solver's replicas for a rate."""
        routings, at_rate = dict.fromkeys((system.thresholds, system.rules) for system in systems), demand(rate)
        return [cascade_systems.redeployed(site, at_rate, *each) for each in routings]

    def tuned(
        plan: Callable[[Demand], System],
        base: float,
        *,
        deploy: bool,
        others: Sequence[System] = (),
        loads: Sequence[float] = LOADS,
        again: Callable[[Demand, System], System] | None = None,
    ) -> Tuned:
        """Its plans for each of the loads and for the rates that these reach, there also with other replicas; and `others`.

        again: plans for a rate that is reached later, from the system that reaches it; None: `plan`.
        """
        plans = list(dict.fromkeys([*(plan(demand(base * load)) for load in loads), *others]))
        rate = selected(plans, base).rate_per_s
        plans.append(plan(demand(rate)))
        best = selected(list(dict.fromkeys([*plans, *(redeployed(plans, rate) if deploy else [])])), base)
        for _ in range(AGAIN):
            if best.rate_per_s < GROWS * rate:
                break
            rate = best.rate_per_s
            further = plan(demand(rate)) if again is None else again(demand(rate), best.furthest)
            best = selected(list(dict.fromkeys([*best.systems, further])), base)
        return best

    targets = [fit.judged.worst + share * (fit.judged.best - fit.judged.worst) for share in shares]
    cheapest = [min(t for t in range(last + 1) if fit.judged.scores[:, t].mean() >= q - 1e-9) for q in targets]
    plan_alone = {tier: partial(cascade_systems.alone, site, tier=tier) for tier in sorted({*cheapest, last})}
    largest = tuned(plan_alone[last], guess, deploy=True)
    load = most_per_s(site, fit, largest.furthest, slo_s, guess)
    chunked = list(largest.systems)
    for chunk in CHUNKS:
        of_chunk = dataclasses.replace(site, limits=dataclasses.replace(site.limits, max_step_tokens=chunk))
        alone = partial(cascade_systems.alone, of_chunk, tier=last)
        chunked += tuned(alone, load, deploy=False).systems
    largest_chunked = selected(list(dict.fromkeys(chunked)), load)
    models = {
        tier: tuned(plan, load, deploy=True, others=largest.systems if tier == last else ())
        for tier, plan in plan_alone.items()
    }
    rows = []
    for share, target, tier in zip(shares, targets, cheapest, strict=True):
        by_load = tuned(partial(cascade_systems.load_based, site, min_quality=target, seed=split), load, deploy=False)
        theirs = [by_load.at_load, by_load.furthest]
        start = [
            each
            for rate in (*(load * times for times in LOADS), by_load.rate_per_s)
            for each in redeployed(theirs, rate)
        ]
        deployed = selected(list(dict.fromkeys([*theirs, *start])), load)
        ours = partial(cascade_systems.ours, site, min_quality=target)
        planned = tuned(ours, load, deploy=True)
        with_rules = partial(tuned, base=load, deploy=True, loads=LOADS[:1], again=partial(under_rules, ours))
        with_long = with_rules(partial(ours, long_answers=True), others=planned.systems)
        with_best = with_rules(partial(ours, long_answers=True, best_answer=True), others=with_long.systems)
        every = [*with_best.systems, *deployed.systems]
        systems = {
            "largest": models[last],
            "largest_chunked": largest_chunked,
            "single": models[tier],
            "load_based": by_load,
            "load_based_deployed": deployed,
            "planned": planned,
            "planned_long": with_long,
            "planned_best": with_best,
            "ours": selected(list(dict.fromkeys(every)), load),
        }
        row: dict[str, Any] = {"family": family.name, "split": split, "min_quality": target, "share": share}
        row |= {"unit_s": unit_s, "load_per_s": load, "single": TIERS[tier], "systems": {}}
        row["most_by_work_per_s"] = cascade_systems.most_by_work(site, fit.judged, target)
        for name, system in systems.items():
            reports, at_load_s = run_of(site, held_out, system.at_load, load, slo_s)
            felt_s = [
                at_load_s,
                *(total_s(site, held_out, system.at_load, times * load, slo_s) for times in SWEEP[1:]),
            ]
            row["systems"][name] = {
                "slo_scale": [float(np.percentile(felt, 100 * ATTAINED)) / unit_s for felt in felt_s],
                "attained": [float((at_load_s <= scale * unit_s).mean()) for scale in SCALES],
                "tier_p95_scale": [report.latency_s.p95 / unit_s if report.requests else None for report in reports],
                "requests_per_s": most_per_s(site, held_out, system.furthest, slo_s, load),
                "at_load": about(system.at_load, held_out),
                "furthest": about(system.furthest, held_out),
            }
        rows.append(row)
        line = "   ".join(
            f"{name} {result['slo_scale'][0]:.2f}, {result['requests_per_s']:.1f}/s"
            for name, result in row["systems"].items()
        )
        print(f"{family.name}, split {split}, quality {target:.1f}, {load:.1f}/s: {line}", flush=True)
    return rows


def under_rules(ours: Callable[..., System], demand: Demand, system: System) -> System:
    """A plan with the rules of another."""
    return ours(demand, rules=system.rules)


def about(system: System, half: Half) -> dict[str, Any]:
    judged = half.judged.under(system.rules)
    routed = route(judged, system.thresholds)
    reached = len(TIERS) - 1 - routed.processed[::-1].argmax(axis=0)  # the last tier of each request
    last, replies = (np.arange(len(judged)), reached), (np.arange(len(judged)), routed.answered)
    by_length = np.zeros(len(judged), np.bool_)
    if judged.long_enough is not None:
        limits = np.array([*system.thresholds, 0.0])
        by_length = judged.long_enough[last] & (judged.scores[last] < limits[reached])
    return {
        "thresholds": [None if h > 100 else h for h in system.thresholds],
        "gpus": system.gpus,
        "replicas": [str(strategy) for strategy in system.strategies],
        "long_answers": [None if rule is None else dataclasses.asdict(rule) for rule in system.rules.long_answers],
        "best_answer": system.rules.best_answer,
        "earlier_answer": float((routed.answered < reached).mean()),
        "by_length": float(by_length.mean()),
        "by_length_quality": float(judged.quality[replies][by_length].mean()) if by_length.any() else None,
        "by_length_largest": float(judged.quality[by_length, -1].mean()) if by_length.any() else None,
        "quality": routed.quality,
    }


def gains(row: dict[str, Any], over: str, of: str) -> dict[str, float]:
    """How many times the system `of` is better: by SLO scale at each load of SWEEP, and by throughput."""
    ours, other = row["systems"][of], row["systems"][over]
    scales = zip(SWEEP, other["slo_scale"], ours["slo_scale"], strict=True)
    times = {f"slo_scale_at_{load:g}": theirs / own for load, theirs, own in scales}
    return {**times, "throughput": ours["requests_per_s"] / other["requests_per_s"]}


def times_over(rows: Sequence[dict[str, Any]], over: str, of: str = "ours") -> dict[str, dict[str, float]]:
    """The geometric mean of the gains, and between which it lies (`spread.interval`, of splits)."""
    by_split: dict[int, list[dict[str, float]]] = {}
    for row in rows:
        by_split.setdefault(row["split"], []).append(gains(row, over, of))
    spread = {}
    for what in gains(rows[0], over, of):
        logs = [statistics.mean(math.log(one[what]) for one in split) for split in by_split.values()]
        times = interval(logs)
        spread[what] = {key: math.exp(times[key]) for key in ("mean", "low", "high")}
    return spread


def publish(rows: Sequence[dict[str, Any]]) -> None:
    """JSON, plots, and the means."""
    targets = list(dict.fromkeys((row["family"], row["share"]) for row in rows))
    of_target = {key: [row for row in rows if (row["family"], row["share"]) == key] for key in targets}
    by_target = [
        {
            "family": family,
            "share": share,
            "over": {name: times_over(of_target[family, share], name) for name in BASELINES},
        }
        for family, share in targets
    ]
    summary: dict[str, Any] = {}
    for name in BASELINES:
        summary[name] = times_over(rows, name)
        for what, spread in summary[name].items():
            means = [one["over"][name][what]["mean"] for one in by_target]
            spread |= {"most": max(means), "least": min(means), "below_0.98": sum(mean < NO_WORSE for mean in means)}
    by_thresholds = {name: times_over(rows, name, "planned") for name in BASELINES if not name.startswith("planned")}
    by_length = times_over(rows, "planned", "planned_long")
    by_best = times_over(rows, "planned_long", "planned_best")
    settings = {
        "splits": sorted({row["split"] for row in rows}),
        "scale": SCALE,
        "sweep": SWEEP,
        "duration_slos": DURATION,
        "horizon_units": HORIZON,
        "planned_requests": PLANNED,
        "loads": LOADS,
        "again": AGAIN,
        "draws": len(DRAWS),
        "judge_s": JUDGE_S,
        "scales": SCALES,
        "chunks": CHUNKS,
    }
    print(
        report.write(
            "cascade",
            {
                **settings,
                "summary": summary,
                "planned_over": by_thresholds,
                "planned_long_over_planned": by_length,
                "planned_best_over_planned_long": by_best,
                "targets": by_target,
                "rows": rows,
            },
        )
    )
    print(json.dumps(summary, indent=1))
    groups = [f"{family.split()[0]}\n{share:g}" for family, share in targets]
    titles = {"slo_scale_at_1": "Tighter SLO at 95 % attainment", "throughput": "More throughput at 95 % attainment"}
    for what, title in titles.items():
        series = {
            label: [(v["mean"], v["low"], v["high"]) for v in (one["over"][name][what] for one in by_target)]
            for name, label in (
                ("largest", "over the largest model alone"),
                ("load_based", "over a load-based cascade"),
            )
        }
        file = f"cascade_{what.removesuffix('_at_1')}"
        print(report.bars(file, f"{title}, by family and share of the quality range", groups, series, "times"))
    print(_plot_attainment(of_target))
    p95 = {tier: [_tier_p95(of_target[key], i) for key in targets] for i, tier in enumerate(TIERS)}
    print(report.bars("cascade_tiers", "p95 of each tier at the load, ours", groups, p95, "SLO units"))


def _tier_p95(rows: Sequence[dict[str, Any]], tier: int) -> tuple[float, float, float]:
    """(mean, least, most) over the splits in which the tier is used; zeros where none does."""
    values = [row["systems"]["ours"]["tier_p95_scale"][tier] for row in rows]
    used = [value for value in values if value is not None]
    return (statistics.mean(used), min(used), max(used)) if used else (0.0, 0.0, 0.0)


def _plot_attainment(of_target: dict[tuple[str, float], list[dict[str, Any]]]) -> Path:
    """Mean attainment over the splits, a panel for each family, at the middle of its targets."""
    middle = sorted({share for _, share in of_target})[len({share for _, share in of_target}) // 2]
    panels = [(family, rows) for (family, share), rows in of_target.items() if share == middle]
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.4), sharey=True, squeeze=False)
    names = {"largest": "largest model alone", "load_based": "load-based cascade", "ours": "ours"}
    for axis, (family, rows) in zip(axes[0], panels, strict=True):
        for name, label in names.items():
            shares = np.array([row["systems"][name]["attained"] for row in rows]).mean(axis=0)
            axis.plot(SCALES, 100 * shares, label=label)
        axis.axhline(100 * ATTAINED, color="grey", linewidth=0.8, linestyle="--")
        axis.set_title(f"{family}, share {middle:g}", fontsize=9)
        axis.set_xlabel("SLO, multiples of its unit")
    axes[0][0].set_ylabel("% of requests within the SLO")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    return report.save("cascade_attainment", figure)


def _run(shares: Sequence[float], splits: Sequence[int]) -> None:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(measure, family, split, shares) for split in splits for family in FAMILIES]
        publish([row for job in jobs for row in job.result()])


def run(_: int) -> None:
    """Nothing here is timed: one round is all."""
    _run(SHARES, SPLITS)


def run_quick(_: int) -> None:
    """One target, two splits."""
    _run(SHARES[1:2], SPLITS[:2])
