"""Bursts, in virtual time: fixed thresholds against a burst ladder, by p95 latency and by the mean quality of every window.

The DeepSeek cascade of `examples/` on 14 H100 (six replicas of small, one of large; medium is not used), at a calm rate that
large sustains with room to spare, with bursts of 40 s about every 300 s. The ladder is planned on one half of the judged
prompts, and the requests are drawn from the other half. The SLO is p95 end to end, a tenth over that of the calm rate alone.

Also with a coarse judge, whose scores are 0, 50 and 100: a ladder that may accept a part of the answers that score just the
threshold, against one that may not.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from penstock.planner_service.api import strategies_of
from penstock.planner_service.codecs.plan_file import ladder_to_json
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.files import read_quality, read_site, read_trace
from penstock.planner_service.question.demand import demand_of, draw_demand
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.quality import SKIPPED, JudgedSample, route
from penstock.planner_service.rules.burst_ladder import TIE_SHARES, burst_ladder
from penstock.planner_service.rules.burst_simulation import simulate_bursts
from penstock.planner_service.simulator import Dispatch
from penstock.planner_service.simulator.workload import Floats, Ints
from penstock.services.domain.hardware import ReplicaShape
from penstock.types.rules import BurstLadder

EXAMPLES = Path(__file__).parents[1] / "examples"
THRESHOLDS, COARSE_THRESHOLDS = (84.0, SKIPPED), (100.0, SKIPPED)
REPLICAS = (((ReplicaShape(1, 1), 6),), (), ((ReplicaShape(8, 1), 1),))
CALM_PER_S = 16.0
FACTORS = (2.0, 3.0, 4.0)
SECONDS, EVERY_S, BURST_S = 1800.0, 300.0, 40.0
WINDOW_S = 600.0
FLOOR, MEANS = 70.0, (83.0, 85.0, 87.0)
COARSE_FLOOR, COARSE_MEAN = 60.0, 80.0
MAX_UTILISATION = 0.75
SEEDS = range(5)
SLO_MARGIN = 1.1


def run(_: int) -> None:
    """Every run is a simulation with a seed of its own; rounds would repeat it."""
    site = read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")
    judged, strategies = read_quality(EXAMPLES / "judged.csv", site.tiers), strategies_of(REPLICAS, site)
    planned_on, served = _halves(judged)
    slo_s = SLO_MARGIN * float(
        np.mean([_fixed(site, _arrivals(1.0, s), served, s, THRESHOLDS, strategies)[0] for s in SEEDS])
    )
    ladders = {mean: _ladder(planned_on, THRESHOLDS, strategies, FLOOR, mean) for mean in MEANS}
    rows = []
    for factor in FACTORS:
        runs: dict[str, list[dict[str, Any]]] = {}
        for seed in SEEDS:
            arrival_s = _arrivals(factor, seed)
            for name, thresholds in _fixed_thresholds(planned_on).items():
                p95_s, scores = _fixed(site, arrival_s, served, seed, thresholds, strategies)
                runs.setdefault(name, []).append(_figures(arrival_s, p95_s, scores, scores))
            for mean, ladder in ladders.items():
                figures = _with_ladder(site, arrival_s, served, seed, ladder, strategies)
                runs.setdefault(f"ladder, mean {mean:g}", []).append(figures)
        rows += [_row(factor, name, of, slo_s) for name, of in runs.items()]
    rough_planned, rough_served = _coarse(planned_on), _coarse(served)
    coarse_rows = []
    for name, shares in (("with ties", TIE_SHARES), ("without ties", ())):
        ladder = _ladder(rough_planned, COARSE_THRESHOLDS, strategies, COARSE_FLOOR, COARSE_MEAN, shares)
        for factor in FACTORS:
            of = [_with_ladder(site, _arrivals(factor, s), rough_served, s, ladder, strategies) for s in SEEDS]
            coarse_rows.append(_row(factor, name, of, slo_s))
    for row in (*rows, *coarse_rows):
        print(
            f"{row['burst']:g}x {row['thresholds']:>22}: p95 {row['p95_s']['mean']:5.1f} s, SLO in {row['slo_held']} of "
            f"{len(SEEDS)}, score {row['score']:.2f}, least of a window {row['least_window_score']:.2f} "
            f"(planned {row['least_window_planned']:.2f}), changes {row['changes']:.0f}"
        )
    report.write(
        "burst_thresholds",
        {
            "calm_per_s": CALM_PER_S,
            "burst_s": BURST_S,
            "every_s": EVERY_S,
            "seconds": SECONDS,
            "window_s": WINDOW_S,
            "seeds": list(SEEDS),
            "slo_p95_s": slo_s,
            "ladder": ladder_to_json(ladders[MEANS[0]]),
            "runs": rows,
            "coarse_mean": COARSE_MEAN,
            "coarse_runs": coarse_rows,
        },
    )


def _halves(judged: JudgedSample) -> tuple[JudgedSample, JudgedSample]:
    rows = np.random.default_rng(0).permutation(len(judged))
    return judged.subset(rows[::2]), judged.subset(rows[1::2])


def _coarse(sample: JudgedSample) -> JudgedSample:
    scores: Floats = np.round(sample.scores / 50) * 50
    return JudgedSample(sample.tiers, sample.input_tokens, sample.output_tokens, scores)


def _ladder(
    judged: JudgedSample,
    thresholds: tuple[float, ...],
    strategies: Sequence[Strategy],
    floor: float,
    mean: float,
    tie_shares: Sequence[float] = TIE_SHARES,
) -> BurstLadder:
    demand = demand_of(
        read_trace(EXAMPLES / "trace.csv"), judged, requests=500, seed=1, lengths="quality", rate=CALM_PER_S
    )
    ladder = burst_ladder(
        demand,
        thresholds,
        strategies,
        Dispatch.CAPACITY,
        floor=floor,
        mean_quality=mean,
        max_utilisation=MAX_UTILISATION,
        tie_shares=tie_shares,
    )
    assert isinstance(ladder, BurstLadder)
    return ladder


def _fixed_thresholds(judged: JudgedSample) -> dict[str, tuple[float, ...]]:
    """The plan's own thresholds, and for each mean the lowest threshold that has it at all times."""
    fixed: dict[str, tuple[float, ...]] = {"fixed, the plan's": THRESHOLDS}
    for mean in MEANS:
        able = (float(level) for level in judged.levels(0) if route(judged, (level, SKIPPED)).quality >= mean)
        fixed[f"fixed, quality {mean:g}"] = (min(able), SKIPPED)
    return fixed


def _arrivals(factor: float, seed: int) -> Floats:
    """Poisson arrivals; each burst begins within 60 s after a multiple of EVERY_S."""
    rng = np.random.default_rng(seed)
    begins = EVERY_S * np.arange(1, SECONDS / EVERY_S) + rng.uniform(0, 60, int(SECONDS / EVERY_S) - 1)
    at_s, arrivals = 0.0, list[float]()
    while at_s < SECONDS:
        in_burst = bool(((begins <= at_s) & (at_s < begins + BURST_S)).any())
        at_s += float(rng.exponential(1 / (CALM_PER_S * (factor if in_burst else 1))))
        arrivals.append(at_s)
    return np.array(arrivals)


def _fixed(
    site: Site,
    arrival_s: Floats,
    judged: JudgedSample,
    seed: int,
    thresholds: tuple[float, ...],
    strategies: Sequence[Strategy],
) -> tuple[float, Floats]:
    """(p95, (N) scores of the accepted answers)."""
    demand: Demand = draw_demand(judged, arrival_s, seed)
    total_s = run_cascade(site, demand, thresholds, strategies, Dispatch.CAPACITY).total_s
    answered = route(demand.requests, thresholds).answered
    return float(np.percentile(total_s, 95)), demand.requests.scores[np.arange(len(arrival_s)), answered]


def _with_ladder(
    site: Site,
    arrival_s: Floats,
    judged: JudgedSample,
    seed: int,
    ladder: BurstLadder,
    strategies: Sequence[Strategy],
) -> dict[str, Any]:
    demand = draw_demand(judged, arrival_s, seed)
    run = simulate_bursts(site, demand, ladder, strategies, Dispatch.CAPACITY, window_s=WINDOW_S, seed=seed)
    planned = np.array([step.quality for step in ladder.steps])[run.steps]
    figures = _figures(arrival_s, float(np.percentile(run.cascade.total_s, 95)), run.scores, planned)
    given_way: Ints = (run.steps > 0).astype(np.int64)
    return figures | {"changes": run.changes, "share_given_way": float(given_way.mean())}


def _figures(arrival_s: Floats, p95_s: float, scores: Floats, planned: Floats) -> dict[str, Any]:
    return {
        "p95_s": p95_s,
        "score": float(scores.mean()),
        "least_window_score": _least_mean(arrival_s, scores),
        "least_window_planned": _least_mean(arrival_s, planned),
        "changes": 0,
        "share_given_way": 0.0,
    }


def _least_mean(arrival_s: Floats, values: Floats) -> float:
    """The least mean over all windows of WINDOW_S that end with a request."""
    sums: Floats = np.concatenate(([0.0], np.cumsum(values)))
    begins = np.searchsorted(arrival_s, arrival_s - WINDOW_S)
    means = (sums[1:] - sums[begins]) / (np.arange(1, len(values) + 1) - begins)
    return float(means[arrival_s >= WINDOW_S].min())


def _row(factor: float, name: str, runs: Sequence[dict[str, Any]], slo_s: float) -> dict[str, Any]:
    p95 = [run["p95_s"] for run in runs]
    return {
        "burst": factor,
        "thresholds": name,
        "p95_s": {"mean": float(np.mean(p95)), "least": min(p95), "most": max(p95)},
        "slo_held": sum(value <= slo_s for value in p95),
        "score": float(np.mean([run["score"] for run in runs])),
        "least_window_score": min(run["least_window_score"] for run in runs),
        "least_window_planned": min(run["least_window_planned"] for run in runs),
        "changes": float(np.mean([run["changes"] for run in runs])),
        "share_given_way": float(np.mean([run["share_given_way"] for run in runs])),
    }
