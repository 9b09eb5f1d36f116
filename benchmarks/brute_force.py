"""The planner's optimum against brute force, on instances that are small enough for brute force.

The joint question is the least cost of a quality within a latency, of up to three tiers of two kinds of replica, on up to
six GPUs and for up to forty prompts, drawn by seed. Brute force tries every form (one model, a pair, a chain, prompts routed
before generation), every combination of thresholds or limits that meets the quality, every split of the GPUs and every
multiset of replicas, each simulated whole. Tests compare the paper's question in the same way (`brute_force`).
"""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.spread import median_and_range
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.files.hardware import gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.planning.cascade_choice import forms_of
from penstock.planner_service.planning.deployers import deployer_for
from penstock.planner_service.planning.plan_cascade import plan_cascade
from penstock.planner_service.question.planning_options import Goal, Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import Dispatch, EngineLimits, Replica, Workload, serve
from penstock.services.domain.hardware import ClusterSpec, ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.planning import Objective

LIMITS = EngineLimits(8, 256, 16)
SEEDS = range(1000, 1200)
FORMS = ("one model", "pair", "chain")


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


def question(seed: int) -> tuple[Site, Demand, Options]:
    """The least cost on a few GPUs, for prompts that are judged in twenties and predicted in tens, well or badly; sometimes
    the larger models are hardly slower, sometimes hardly better."""
    rng = np.random.default_rng(seed)
    tiers, gpus, count = 2 + seed % 2, int(rng.integers(3, 7)), int(rng.integers(20, 41))
    speeds = np.cumsum(rng.uniform(0.1, rng.choice([0.5, 2.0, 6.0]), tiers))
    hard = rng.random((count, 1))
    means = 90 - hard * np.linspace(rng.uniform(40, 90), rng.uniform(5, 30), tiers)
    scores = np.clip(np.round(rng.normal(means, 12) / 20) * 20, 0, 100)
    predicted = np.clip(np.round((scores + rng.normal(0, rng.choice([5, 30, 60]), scores.shape)) / 10) * 10, 0, 100)
    names = ("small", "medium", "large")[:tiers]
    sample = JudgedSample(names, rng.integers(5, 60, count), rng.integers(2, 50, (count, tiers)), scores, predicted)
    demand = Demand(sample, sample, np.cumsum(rng.exponential(rng.choice([0.05, 0.2]), count)))
    cluster, model = ClusterSpec(gpu_of_catalogue("h100"), 1, gpus, 1e9), model_of_catalogue("qwen2.5-1.5b")
    site = Site(cluster, names, (model,) * tiers, measured=tuple(tuple(kinds(speed)) for speed in speeds))
    qualities = scores.mean(axis=0)
    target = float(qualities.min() + rng.uniform(0.2, 1.0) * (qualities.max() - qualities.min()))
    alone_s = float(np.percentile(deployer_of(site, demand).alone_s()[-1], 95))
    limit_s = float(rng.uniform(1.0, 5.0)) * alone_s
    return (
        site,
        demand,
        Options(min_quality=target, max_latency_s=limit_s, goal=Goal.COST, objective=Objective.END_TO_END),
    )


def deployer_of(site: Site, demand: Demand) -> Deployer:
    share = Options().max_utilisation
    return deployer_for(site, demand, gpus=None, dispatch=Dispatch.CAPACITY, max_utilisation=share)[0]


def least_gpus(site: Site, demand: Demand, options: Options) -> tuple[int, set[str]] | None:
    """The fewest GPUs with which the targets hold, and all forms that have a plan on so few; None where none has.

    Over every form, every combination of thresholds or of limits of predicted scores, every split of the GPUs and every
    multiset of replicas; each simulated whole.
    """
    routings = [*_routings(site, demand, options)]
    for gpus in range(1, site.gpus + 1):
        if able := {routing[0] for routing in routings if _holds(gpus, options, *routing[1:])}:
            return gpus, able
    return None


def _routings(
    site: Site, demand: Demand, options: Options
) -> Iterator[tuple[str, Site, Demand, tuple[float, ...], Deployer]]:
    """With the quality and different from each other: the kind of form, what it is of, thresholds, and a deployer."""
    seen = set[tuple[Any, ...]]()
    for form in forms_of(len(site.tiers), dataclasses.replace(options, max_tiers=len(site.tiers)), predicted=True):
        parts = form.of(site, demand)
        sample, deployer = parts[1].judged, deployer_of(*parts)
        for thresholds in itertools.product(*(sample.levels(tier) for tier in range(len(form.tiers) - 1))):
            routed = route(sample, thresholds)
            used = [tier for tier, chosen in zip(form.tiers, routed.processed, strict=True) if chosen.any()]
            is_routed = form.routed and len(used) > 1
            key = is_routed, *used, routed.processed[routed.processed.any(axis=1)].tobytes()
            if routed.quality >= (options.min_quality or 0.0) - 1e-9 and key not in seen:
                seen.add(key)
                name = "routed" if is_routed else FORMS[len(used) - 1]
                yield name, *parts, thresholds, deployer


def _holds(
    gpus: int, options: Options, site: Site, demand: Demand, thresholds: tuple[float, ...], deployer: Deployer
) -> bool:
    """Whether any replicas of all `gpus` sustain the rate and keep the latency."""
    processed = route(demand.requests, thresholds).processed
    splits = itertools.product(range(gpus + 1), repeat=len(processed))
    for split in splits:
        if sum(split) != gpus or any(bool(n) != chosen.any() for n, chosen in zip(split, processed, strict=True)):
            continue
        for mix in itertools.product(*(_multisets(deployer.kinds[t], n) for t, n in enumerate(split))):
            strategies = [Strategy(parts, 0.0) for parts in mix]
            if deployer.sustains(thresholds, strategies):
                run = run_cascade(site, demand, thresholds, strategies, Dispatch.CAPACITY)
                if run.latency_s(options.objective, options.percentile) <= (options.max_latency_s or np.inf):
                    return True
    return False


def _multisets(kinds: Sequence[Replica], gpus: int) -> list[tuple[tuple[Replica, int], ...]]:
    """All of one GPU and of two GPUs each, on exactly so many."""
    small, large = kinds
    counts = ((gpus - 2 * n, n) for n in range(gpus // 2 + 1))
    return [tuple((kind, n) for kind, n in zip((small, large), pair, strict=True) if n) for pair in counts]


def compare(seed: int) -> dict[str, Any]:
    site, demand, options = question(seed)
    began = time.process_time()
    planned: tuple[int, str] | None = None
    try:
        plan = plan_cascade(site, demand, options)
        used = sum(tier.strategy.used for tier in plan.tiers)
        planned = plan.gpus, "routed" if plan.is_routed else FORMS[used - 1]
    except Unreachable:
        pass
    between = time.process_time()
    best = least_gpus(site, demand, options)
    ended = time.process_time()
    return {
        "seed": seed,
        "tiers": len(site.tiers),
        "gpus": site.gpus,
        "prompts": len(demand.judged),
        "planned_gpus": None if planned is None else planned[0],
        "planned_form": None if planned is None else planned[1],
        "optimum_gpus": None if best is None else best[0],
        "forms_of_optimum": [] if best is None else sorted(best[1]),
        "equal": (planned or (None,))[0] == (best or (None,))[0],
        "planner_seconds": between - began,
        "brute_force_seconds": ended - between,
    }


def run(rounds: int) -> None:  # noqa: ARG001 -- the instances are the rounds
    compare(SEEDS[0])  # compile
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(compare, SEEDS))
    only = Counter(row["forms_of_optimum"][0] for row in rows if len(row["forms_of_optimum"]) == 1)
    figures = {
        "instances": len(rows),
        "equal": sum(row["equal"] for row in rows),
        "feasible": sum(row["optimum_gpus"] is not None for row in rows),
        "best_form_alone": dict(only),
        "seeds": [SEEDS[0], SEEDS[-1]],
        "cpu_seconds": {
            label: list(median_and_range([row[f"{of}_seconds"] for row in rows]))
            for label, of in (("planner", "planner"), ("brute force", "brute_force"))
        },
        "differing": [row for row in rows if not row["equal"]],
    }
    path = report.write("brute_force", figures)
    print(
        f"{figures['equal']} of {len(rows)} equal, {figures['feasible']} feasible; alone the best: {dict(only)}\n{path}"
    )
