"""Bursts, in virtual time: fixed thresholds against thresholds that move with a price of waiting, by p95 and mean quality.

The DeepSeek cascade of `examples/` on 14 H100 (six replicas of small, one of large; medium is not used), at a calm rate that
large sustains with room to spare, with bursts of 40 s about every 300 s. Fixed thresholds are the plan's own and lower ones.
The SLO is p95 end to end, a tenth over that of the calm rate alone.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.priced_simulation import PricedRouting, simulate_priced
from penstock.planner_service.question.demand import draw_demand
from penstock.planner_service.question.site import replica_kinds
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.simulator import Replica
from penstock.planner_service.simulator.workload import Floats
from penstock.services.acceptance.wait_price import Price
from penstock.services.domain.hardware import ReplicaShape
from penstock.types.plans import TierPlan
from tests.support.inputs import read_quality, read_site

EXAMPLES = Path(__file__).parents[1] / "examples"
TIERS = ((0, ReplicaShape(1, 1), 6), (2, ReplicaShape(8, 1), 1))  # (of the cascade, shape, replicas)
GPUS, LONGEST = 8, 20_000
THRESHOLD = 84.0
WAYS = {
    "the plan's": (THRESHOLD, Price(0.0)),
    **{f"fixed at {threshold:g}": (threshold, Price(0.0)) for threshold in (82.0, 80.0, 78.0, 75.0, 71.0, 67.0)},
    **{f"price {price:g}": (THRESHOLD, Price(price)) for price in (1.0, 2.0, 4.0, 8.0)},
    "price 4, at most 9 points": (THRESHOLD, Price(4.0, most=9.0)),
}
CALM_PER_S = 16.0
FACTORS = (2.0, 3.0, 4.0)
SECONDS, EVERY_S, BURST_S = 1800.0, 300.0, 40.0
WINDOW_S = 600.0
SEEDS = range(5)
SLO_MARGIN = 1.1


def run(_: int) -> None:
    """Every run is a simulation with a seed of its own; rounds would repeat it."""
    with ProcessPoolExecutor() as pool:
        calm = [pool.submit(_figures, 1.0, seed, "the plan's") for seed in SEEDS]
        cells = {
            (factor, way): [pool.submit(_figures, factor, seed, way) for seed in SEEDS]
            for factor in FACTORS
            for way in WAYS
        }
        slo_s = SLO_MARGIN * float(np.mean([job.result()["p95_s"] for job in calm]))
        rows = [_row(*cell, [job.result() for job in jobs], slo_s) for cell, jobs in cells.items()]
    for row in rows:
        print(
            f"{row['burst']:g}x {row['thresholds']:>26}: p95 {row['p95_s']['mean']:5.1f} s, SLO in {row['slo_held']} of "
            f"{len(SEEDS)}, score {row['score']:.2f}, least of a window {row['least_window_score']:.2f}"
        )
    figures = {"calm_per_s": CALM_PER_S, "burst_s": BURST_S, "every_s": EVERY_S, "seconds": SECONDS, "seeds": [*SEEDS]}
    print(report.write("burst_thresholds", figures | {"window_s": WINDOW_S, "slo_p95_s": slo_s, "runs": rows}))


def _figures(factor: float, seed: int, way: str) -> dict[str, float]:
    judged, replicas = _cascade()
    threshold, price = WAYS[way]
    arrival_s = _arrivals(factor, seed)
    rule = PricedRouting((TierPlan("small", "", threshold, 1), TierPlan("large", "", None, 1)), price)
    served = simulate_priced(draw_demand(judged, arrival_s, seed), rule, replicas, 0.0)
    return {
        "p95_s": float(np.percentile(served.total_s, 95)),
        "score": float(served.quality.mean()),
        "least_window_score": _least_mean(arrival_s, served.quality),
    }


def _cascade() -> tuple[JudgedSample, list[list[Replica]]]:
    """The judged prompts of the two tiers, which no predicted score keeps from the first, and the replicas."""
    site = read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")
    judged, columns = read_quality(EXAMPLES / "judged.csv", site.tiers), [tier for tier, _, _ in TIERS]
    names, predicted = tuple(site.tiers[tier] for tier in columns), np.full((len(judged), len(columns)), 100.0)
    sample = JudgedSample(
        names, judged.input_tokens, judged.output_tokens[:, columns], judged.scores[:, columns], predicted
    )
    kinds = [{kind.shape: kind for kind in replica_kinds(site, tier, GPUS, LONGEST)[0]} for tier in columns]
    return sample, [[of[shape]] * count for of, (_, shape, count) in zip(kinds, TIERS, strict=True)]


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


def _least_mean(arrival_s: Floats, values: Floats) -> float:
    """The least mean over all windows of WINDOW_S that end with a request."""
    sums: Floats = np.concatenate(([0.0], np.cumsum(values)))
    begins = np.searchsorted(arrival_s, arrival_s - WINDOW_S)
    means = (sums[1:] - sums[begins]) / (np.arange(1, len(values) + 1) - begins)
    return float(means[arrival_s >= WINDOW_S].min())


def _row(factor: float, way: str, runs: Sequence[dict[str, float]], slo_s: float) -> dict[str, Any]:
    p95 = [run["p95_s"] for run in runs]
    return {
        "burst": factor,
        "thresholds": way,
        "p95_s": {"mean": float(np.mean(p95)), "least": min(p95), "most": max(p95)},
        "slo_held": sum(value <= slo_s for value in p95),
        "score": float(np.mean([run["score"] for run in runs])),
        "least_window_score": min(run["least_window_score"] for run in runs),
    }
