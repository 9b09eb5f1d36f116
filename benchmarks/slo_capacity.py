"""Capacity under SLOs: the SLO policy against the policies that know none, on published A100 profiles, simulated.

Capacity is the highest rate, per GPU, at which 90 % (and 98 %) of all requests that arrive attain their SLO: one that is
dropped or served as best effort has missed. Every system has three GPUs (DistServe-like: two, or three by two
ratios) and is tuned by a search of its own, whose settings are in the result. Lengths are known to admission, as in the
paper. Scenarios: `slo_scenarios`; systems: `slo_systems`.

Also: ablations; overload of 1.4 and 2 times the capacity; and one to four replicas, with hops and without.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.slo_baselines import BatchPolicy, Deployment, PlainReplicas, served
from benchmarks.slo_scenarios import LOOSE_TPOT_S, SCENARIOS, TIGHT_TPOT_S, Scenario, Stretch, stretch
from benchmarks.slo_scenarios import replica as replica_of
from benchmarks.slo_systems import (
    GPUS,
    SLO_STEP_TOKENS,
    Hardware,
    baselines,
    hardware,
    slo_replicas,
    slo_settings,
    with_limits,
)
from penstock.planner_service.simulator import Replica
from penstock.planner_service.simulator.judged import Judged, SloReplicas
from penstock.planner_service.simulator.workload import Bools
from penstock.services.domain.latency import StepLoad
from penstock.services.domain.slo.speculation import SpeculationTier, speculation_lengths

TARGETS = (0.9, 0.98)
PRECISION = 1.02  # of a capacity: the lowest rate that misses the target is at most so many times as high
LOWEST_PER_S, HIGHEST_PER_S = 0.005, 500.0
OVERLOADS = (1.4, 2.0)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long runs are. requests: of each run; seeds: of the runs; tuning: requests of the runs that choose settings."""

    requests: int
    seeds: tuple[int, ...]
    tuning: int


FULL = Effort(6000, (1, 2, 3, 4, 5), 1500)
QUICK = Effort(1500, (1, 2), 450)


def attained(judged: Judged, run: Stretch) -> Bools:
    """(requests) a request attains its SLO if every round of it does."""
    result = np.ones(run.requests, np.bool_)
    np.logical_and.at(result, run.request, judged.attained)
    return result


def reaches(deployment: Deployment, runs: Iterable[Stretch], requests: int, target: float) -> bool:
    """Whether the share of all requests of all runs is at least the target; gives up as soon as it cannot be."""
    allowed = math.floor((1 - target) * requests + 1e-9)
    for run in runs:
        rounds = int(np.bincount(run.request).max())
        judged = served(deployment, run.work, run.promises, misses_allowed=allowed * rounds)
        allowed -= int((~attained(judged, run)).sum())
        if allowed < 0:
            return False
    return True


def capacity_per_s(
    deployment: Deployment, scenario: Scenario, target: float, requests: int, seeds: Sequence[int], start: float = 1.0
) -> float:
    """Requests per second and GPU, searched from `start`; 0 where even the lowest rate misses."""
    latency = deployment.replica.latency

    def holds(per_gpu_s: float) -> bool:
        runs = (stretch(scenario, latency, per_gpu_s * deployment.gpus, requests, seed) for seed in seeds)
        parts = len(scenario.applications)
        return reaches(deployment, runs, requests // parts * parts * len(seeds), target)

    return highest_per_s(holds, start)


def highest_per_s(holds: Callable[[float], bool], start: float) -> float:
    """The highest rate that holds, by doubling and bisection from `start`; 0 where even the lowest does not."""
    low, high = start, start
    if holds(start):
        while holds(high * 2) and high < HIGHEST_PER_S:
            high *= 2
        low, high = high, high * 2
    else:
        while not holds(low / 2):
            low /= 2
            if low < LOWEST_PER_S:
                return 0.0
        low, high = low / 2, low
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def tuned(
    settings: dict[str, Deployment], scenario: Scenario, target: float, effort: Effort
) -> tuple[str, Deployment, dict[str, float]]:
    """(the best setting's name, the setting, the capacity of each): by shorter runs of one seed."""
    short = {
        name: capacity_per_s(one, scenario, target, effort.tuning, effort.seeds[:1]) for name, one in settings.items()
    }
    best = max(short, key=lambda name: short[name])
    return best, settings[best], short


def measure(scenario: Scenario, target: float, effort: Effort, on: Hardware) -> dict[str, Any]:
    """Capacity of the SLO policy and of every tuned baseline."""
    systems: dict[str, dict[str, Any]] = {}
    for system, settings in baselines(on).items():
        setting, deployment, tried = tuned(settings, scenario, target, effort)
        start = max(LOWEST_PER_S * 2, tried[setting])
        per_s = capacity_per_s(deployment, scenario, target, effort.requests, effort.seeds, start=start)
        systems[system] = {"per_gpu_s": per_s, "setting": setting, "tuning_per_gpu_s": tried}
        print(f"  {scenario.name} {target:.0%} {system}: {per_s:.3f}/s per GPU with {setting}", flush=True)
    setting, slo, tried = tuned(slo_settings(on), scenario, target, effort)
    start = max(LOWEST_PER_S * 2, tried[setting])
    ours = capacity_per_s(slo, scenario, target, effort.requests, effort.seeds, start=start)
    best = max(systems, key=lambda system: systems[system]["per_gpu_s"])
    over = ours / systems[best]["per_gpu_s"] if systems[best]["per_gpu_s"] > 0 else math.inf
    best_setting = baselines(on)[best][systems[best]["setting"]]
    by_seed = list[float]()
    for seed in effort.seeds if target == TARGETS[0] else ():
        slo_per_s = capacity_per_s(slo, scenario, target, effort.requests, (seed,), start=ours)
        other = capacity_per_s(best_setting, scenario, target, effort.requests, (seed,), start=ours / over)
        by_seed.append(slo_per_s / max(LOWEST_PER_S, other))
    print(
        f"{scenario.name} at {target:.0%}: slo {ours:.3f}/s per GPU with {setting}, {over:.2f} times {best}; by seed "
        + ", ".join(f"{ratio:.2f}" for ratio in by_seed),
        flush=True,
    )
    return {
        "name": scenario.name,
        "attainment": target,
        "slo_per_gpu_s": ours,
        "slo_setting": setting,
        "slo_tuning_per_gpu_s": tried,
        "best_baseline": best,
        "over_best_baseline": over,
        "over_best_baseline_by_seed": by_seed,
        "baselines": systems,
    }


def ablations(scenario: Scenario, full_per_s: float, effort: Effort) -> dict[str, Any]:
    """Capacity at 90 % without one part at a time, over that of all of it."""
    replica = replica_of(scenario.model)
    requests, seeds = effort.tuning, effort.seeds[:2]

    def over(deployment: Deployment) -> float:
        return capacity_per_s(deployment, scenario, TARGETS[0], requests, seeds, start=full_per_s) / whole

    whole = capacity_per_s(slo_replicas(replica), scenario, TARGETS[0], requests, seeds, start=full_per_s)
    rows: dict[str, Any] = {
        "all": 1.0,
        "without admission": over(PlainReplicas(with_limits(replica, 512), BatchPolicy.DECODE_FIRST, GPUS)),
        "batches of 512 tokens at most": over(SloReplicas(with_limits(replica, 512), GPUS, hops=GPUS - 1)),
        "without hops": over(slo_replicas(replica, hops=0)),
        "speculation, by the solver": speculation(replica, scenario),
    }
    print(
        f"  ablations of {scenario.name}: "
        + ", ".join(f"{k} {v}" if isinstance(v, dict) else f"{k} {v:.2f}" for k, v in rows.items()),
        flush=True,
    )
    return {"name": scenario.name, "over_all": rows}


DRAFT_SHARE, SOLVER_ACCEPTANCE = 0.05, 0.7
"""ASSUMED for the solver's row: a draft step takes this share of a step's base time, a draft token is accepted so often."""


def speculation(replica: Replica, scenario: Scenario) -> dict[str, float]:
    """Prompt tokens per second next to a full batch of decodes, with the solver's lengths over without: not executed."""
    work = stretch(scenario, replica.latency, 1.0, 600, 1).work
    context = float((work.input_tokens + work.output_tokens / 2).mean())
    decodes = int(min(replica.limits.max_running, replica.lane_tokens / context) / 2)
    latency = replace(replica.latency, draft_step_s=DRAFT_SHARE * replica.latency.base_s(decodes))
    tpot_s = (
        TIGHT_TPOT_S if all(a.tpot_s == TIGHT_TPOT_S or a.thinking for a in scenario.applications) else LOOSE_TPOT_S
    )
    tiers = [SpeculationTier(decodes, tpot_s, SOLVER_ACCEPTANCE)]
    plan = speculation_lengths(tiers, latency, context_tokens=round(context * decodes), max_step_tokens=SLO_STEP_TOKENS)
    plain_tokens = latency.tokens_within(tpot_s, SLO_STEP_TOKENS - decodes, StepLoad(decodes, round(context * decodes)))
    if plan is None or plain_tokens <= 0:
        return {"decodes": decodes, "length": 0, "prompt_tokens_over_plain": 0.0}
    return {
        "decodes": decodes,
        "length": plan.lengths[0],
        "prompt_tokens_over_plain": plan.prefill_tokens_per_s / (plain_tokens / tpot_s),
    }


def overload(scenario: Scenario, full_per_s: float, effort: Effort) -> dict[str, Any]:
    """Goodput at multiples of the capacity: attained requests per second of arrivals, over the highest of all multiples.

    Where goodput still rises at the highest rate, that is its peak; so each rate is compared with the lower ones, too.
    """
    fleet = slo_replicas(replica_of(scenario.model))
    rows = []
    for times in (0.8, 1.0, 1.2, *OVERLOADS):
        goodput, attained_admitted, admitted, unfinished = [], 0, 0, 0
        for seed in effort.seeds:
            run = stretch(scenario, fleet.replica.latency, full_per_s * GPUS * times, effort.requests, seed)
            judged = fleet.serve(run.work, run.promises)
            goodput.append(float(attained(judged, run).sum()) / (run.requests / (full_per_s * GPUS * times)))
            admitted += int(judged.admitted.sum())
            attained_admitted += int((judged.admitted & judged.attained).sum())
            unfinished += int((judged.finish_s == 0).sum())
        rows.append(
            {
                "times_capacity": times,
                "goodput_per_s": statistics.fmean(goodput),
                "attainment_of_admitted": attained_admitted / max(1, admitted),
                "unfinished": unfinished,
            }
        )
    peak, lower = max(row["goodput_per_s"] for row in rows), 0.0
    for row in rows:
        lower = max(lower, row["goodput_per_s"])
        row["goodput_over_peak"] = row["goodput_per_s"] / peak
        row["goodput_over_peak_up_to_here"] = row["goodput_per_s"] / lower
    print(
        f"  overload of {scenario.name}: "
        + ", ".join(
            f"{row['times_capacity']}x {row['goodput_over_peak']:.2f} ({row['goodput_over_peak_up_to_here']:.2f})"
            for row in rows
        )
        + " of the peak (of that up to there)"
        + f"; of those admitted {min(row['attainment_of_admitted'] for row in rows):.2%} attained",
        flush=True,
    )
    return {"name": scenario.name, "rows": rows}


def scaling(scenario: Scenario, effort: Effort) -> dict[str, Any]:
    """Capacity of one to four replicas together over that of one; with hops, and without them as the control."""
    replica, rows = replica_of(scenario.model), {}
    requests, seeds = effort.requests, effort.seeds
    start = 1.0
    for hops in (True, False):
        totals = []
        for count in range(1, 5):
            fleet = slo_replicas(replica, count, hops=count - 1 if hops else 0)
            start = capacity_per_s(fleet, scenario, TARGETS[0], requests, seeds, start=max(start, LOWEST_PER_S * 2))
            totals.append(start * count)
        rows["hops" if hops else "no_hops"] = {"per_s": totals, "over_one": [t / totals[0] for t in totals]}
    print(
        f"  four replicas of {scenario.name}: {rows['hops']['over_one'][3]:.2f} times one, "
        f"without hops {rows['no_hops']['over_one'][3]:.2f}",
        flush=True,
    )
    return {"name": scenario.name, "bursty": scenario.bursty, **rows}


def of_scenario(effort: Effort, scenario: Scenario) -> Effort:
    """A reply of minutes needs long runs for tuning too: backlog shows only after several of them."""
    return replace(effort, tuning=effort.requests) if scenario.long_replies else effort


def geo_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def run_all(effort: Effort) -> None:
    by_target: dict[float, list[dict[str, Any]]] = {target: [] for target in TARGETS}
    others: dict[str, list[dict[str, Any]]] = {"ablations": [], "overload": [], "replicas": []}
    for scenario in SCENARIOS:
        own = of_scenario(effort, scenario)
        for target in TARGETS:
            by_target[target].append(measure(scenario, target, own, hardware(scenario.model)))
        full_per_s = by_target[TARGETS[0]][-1]["slo_per_gpu_s"]
        others["ablations"].append(ablations(scenario, full_per_s, own))
        others["overload"].append(overload(scenario, full_per_s, own))
        others["replicas"].append(scaling(scenario, own))
    means = {target: geo_mean([row["over_best_baseline"] for row in rows]) for target, rows in by_target.items()}
    for target, mean in means.items():
        print(f"capacity at {target:.0%} attainment: {mean:.2f} times the best baseline (geometric mean)", flush=True)
    figures = {
        "geo_mean_over_best_baseline": means[TARGETS[0]],
        "geo_mean_over_best_baseline_at_98": means[TARGETS[1]],
        "scenarios": by_target[TARGETS[0]],
        "scenarios_at_98": by_target[TARGETS[1]],
        **others,
        "lengths": "drawn from table 4 of the paper, known to admission",
        "gpus": GPUS,
        "requests_per_run": effort.requests,
        "seeds": effort.seeds,
    }
    print(report.write("slo_capacity", figures))


def run_quick(_: int) -> None:
    """Short runs, three seeds."""
    run_all(QUICK)


def run(_: int) -> None:
    """Long runs, five seeds."""
    run_all(FULL)
