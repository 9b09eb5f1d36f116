"""The planner's optimum against brute force, on instances that are small enough for brute force.

An instance is two or three tiers of two kinds of replica, a handful of judged requests and a few GPUs, drawn by seed. Brute
force tries every combination of thresholds that meets the quality, every split of the GPUs and every multiset of replicas.
"""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.spread import median_and_range
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.goals import least_latency
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import Dispatch, EngineLimits, Replica, Workload, serve
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel

LIMITS = EngineLimits(8, 256, 16)
GPUS = (2, 3, 4, 5, 6)
INSTANCES = 40  # for each number of GPUs


def exhaustive_latency(
    work: Workload, kinds: Sequence[Replica], gpus: int, dispatch: Dispatch, percentile: float
) -> Strategy | None:
    """The best of *every* multiset of replicas on at most `gpus`: exponential."""
    best: Strategy | None = None

    def extend(parts: tuple[tuple[Replica, int], ...], kind: int, left: int) -> None:
        nonlocal best
        if kind == len(kinds):
            if parts:
                replicas = [replica for replica, count in parts for _ in range(count)]
                served = serve(work, replicas, dispatch)
                latency = float(np.percentile(served.finish_s - work.arrival_s, percentile))
                if best is None or latency < best.latency_s:
                    best = Strategy(parts, latency)
            return
        for count in range(left // kinds[kind].shape.gpus + 1):
            more = (*parts, (kinds[kind], count)) if count else parts
            extend(more, kind + 1, left - count * kinds[kind].shape.gpus)

    extend((), 0, gpus)
    return best


def kinds(speed: float) -> list[Replica]:
    """One GPU, and two that are faster but not twice as fast."""
    return [
        Replica(ReplicaShape(tp, 1), StepLatencyModel.linear(0.02 * speed / k, 1e-4 * speed / k, 1e-6), 4096, LIMITS)
        for tp, k in ((1, 1.0), (2, 1.7))
    ]


def instance(seed: int, tiers: int = 3, count: int = 10, gpus: int = 6) -> tuple[Deployer, JudgedSample]:
    """`count` requests with scores in tens, higher on average from larger tiers."""
    rng = np.random.default_rng(seed)
    names = ("small", "medium", "large")[-tiers:]
    means = np.linspace(40, 85, tiers)
    scores = np.clip(np.round(rng.normal(means, 25, (count, tiers)) / 10) * 10, 0, 100)
    sample = JudgedSample(names, rng.integers(5, 60, count), rng.integers(2, 50, (count, tiers)), scores)
    arrivals = np.cumsum(rng.exponential(0.05, count))
    speeds = (0.5, 1.0, 3.0)[-tiers:]
    return Deployer(sample, arrivals, [kinds(s) for s in speeds], gpus), sample


def wanted_quality(sample: JudgedSample) -> float:
    """Six tenths of the way from the first tier's mean score to the last's."""
    return float(sample.worst + 0.6 * (sample.best - sample.worst))


def brute_force(deployer: Deployer, sample: JudgedSample, min_quality: float) -> float:
    """The lowest latency; infinite if nothing meets the quality with these GPUs."""
    levels = [sample.levels(tier) for tier in range(len(sample.tiers) - 1)]
    best = np.inf
    cache: dict[tuple[int, bytes], list[float]] = {}
    for thresholds in itertools.product(*levels):
        routed = route(sample, thresholds)
        if routed.quality < min_quality - 1e-9:
            continue
        tables = []
        for tier, chosen in enumerate(routed.processed):
            key = (tier, chosen.tobytes())
            if key not in cache:
                work = deployer.workload(tier, chosen)
                cache[key] = []
                for f in range(deployer.gpus + 1):
                    strategy: Strategy | None = Strategy((), 0.0)
                    if len(work):
                        strategy = exhaustive_latency(work, deployer.kinds[tier], f, Dispatch.CAPACITY, 95.0)
                    cache[key].append(np.inf if strategy is None else strategy.latency_s)
            tables.append(cache[key])
        for counts in itertools.product(range(deployer.gpus + 1), repeat=len(tables)):
            if sum(counts) <= deployer.gpus:
                best = min(best, max(table[f] for table, f in zip(tables, counts, strict=True)))
    return float(best)


def compare(seed: int, gpus: int) -> dict[str, Any]:
    deployer, sample = instance(seed, tiers=2 + seed % 2, count=5 + seed % 4, gpus=gpus)
    began = time.perf_counter()
    try:
        latency_s = least_latency(deployer, wanted_quality(sample)).deployment.latency_s
    except Unreachable:
        latency_s = np.inf
    between = time.perf_counter()
    best = brute_force(deployer, sample, wanted_quality(sample))
    ended = time.perf_counter()
    return {
        "seed": seed,
        "gpus": gpus,
        "found_s": latency_s if latency_s < np.inf else None,
        "optimum_s": best if best < np.inf else None,
        "equal": latency_s == best or abs(latency_s - best) <= 1e-9 * best,
        "planner_seconds": between - began,
        "brute_force_seconds": ended - between,
    }


def run(rounds: int) -> None:  # noqa: ARG001 -- the instances are the rounds
    compare(0, 2)  # compile
    rows = [compare(1000 * gpus + i, gpus) for gpus in GPUS for i in range(INSTANCES)]
    equal, feasible = sum(row["equal"] for row in rows), sum(row["optimum_s"] is not None for row in rows)
    series = {
        label: [median_and_range([row[of] for row in rows if row["gpus"] == gpus]) for gpus in GPUS]
        for label, of in (("planner", "planner_seconds"), ("brute force", "brute_force_seconds"))
    }
    figures = {
        "instances": len(rows),
        "equal": equal,
        "feasible": feasible,
        "seeds": [[1000 * gpus, 1000 * gpus + INSTANCES - 1] for gpus in GPUS],
        "gpus": GPUS,
        "seconds": {label: [list(spread) for spread in spreads] for label, spreads in series.items()},
        "differing": [row for row in rows if not row["equal"]],
    }
    path = report.write("brute_force", figures)
    title = f"Seconds to the optimum; the same one in {equal} of {len(rows)} instances"
    plot = report.bars("brute_force", title, [f"{gpus} GPUs" for gpus in GPUS], series, "seconds", log=True)
    print(f"{equal} of {len(rows)} equal, {feasible} of them feasible\n{path}\n{plot}")
