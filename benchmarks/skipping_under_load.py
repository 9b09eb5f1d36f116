"""Skip prediction and thresholds under load: the plan's fixed limits against limits that move with a price of waiting.

A cascade of the two larger models of the family of judged prompts that has texts, on H100 of the example cluster: the shapes
that serve most per GPU, and the numbers of replicas that sustain the highest rate. Arrivals and lengths are those of recorded
traces; the larger model's answers are longer or shorter by ratios of WildBench. A judge with an AUC of about 0.9 scores
answers by the chance that they are right.

Per trace and seed, a stretch of the trace is served: predictor, thresholds, skip limits and price are fitted with one half of
the prompts, and figures are of the other half. Both rules have the least p95 of at least the same quality, at each load.
Capacity is that with fixed limits: the highest rate at which a stretch that is served twice in a row does not take longer the
second time. `kept`: the rules fitted to .9 of it, served at .3. `long answers`: with that rule instead of a price; `both`:
with a price too where that has the lesser p95 for the first half.
"""

import csv
import gzip
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.priced_simulation import PricedRouting, simulate_priced
from benchmarks.public_data import public
from benchmarks.rivals.families import Family, family
from benchmarks.spread import interval
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.question.demand import stretch_of
from penstock.planner_service.question.score_predictor import train
from penstock.planner_service.question.site import Demand, replica_kinds
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.simulator import Replica, Workload
from penstock.planner_service.simulator.judged import has_one_batch
from penstock.planner_service.simulator.workload import Floats
from penstock.services.acceptance.wait_price import Price
from penstock.types.plans import TierPlan
from penstock.types.rules import LongAnswers

FAMILY, TIERS = "llmrouter_mistral7B-llama8B-nemotron51B.jsonl.gz", ("medium", "large")
LENGTH_RATIOS = "quality/wildbench_reka_edge-flash-core.csv.gz"
TRACES = ("azure2023_conv", "servegen_m-small_sample_1h")
GPUS = 9
SEEDS, QUICK_SEEDS = (1, 2, 3), (1,)
REQUESTS, QUICK_REQUESTS = 4000, 800
LOADS = (0.9, 0.3)
TARGET_SHARE = 0.75  # of the way from the smaller tier's quality to the best of any threshold
PRICES = (15.0, 30.0, 60.0)  # points per second
SKIP_SHARES = (0.2,)  # quantiles of predicted scores
LONG_SHARES = (0.6, 0.85)  # quantiles of output tokens, from which on `long answers` are accepted
MOST_TIMES = 6  # as long an answer of the larger tier is as the smaller one's
JUDGE_ERROR, JUDGE_S = 0.55, 0.1
GROWTH = 1.1  # of the mean latency the second time: more is a backlog
PRECISION = 1.03
HIGHEST_THRESHOLDS = (90.0, 60.0)
THRESHOLD_PRECISION = 1.0
PENALTIES = (3.0,)  # of the predictor


WAYS = (
    ("fixed", "priced"),
    ("fixed", "long answers"),
    ("fixed", "both"),
    ("long answers", "both"),
    ("kept fixed", "kept priced"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Half of the prompts, and the stretch of a trace that they are served with, at its own rate."""

    quality: Floats
    scores: Floats
    predicted: Floats
    stretch: Workload
    ratios: Floats
    seed: int

    def demand(self, rate: float, times: int = 1) -> Demand:
        """The requests at so many per second, so many times in a row."""
        n = len(self.stretch)
        rng = np.random.default_rng(self.seed)
        rows = np.resize(rng.permutation(len(self.scores)), n)
        arrival_s = self.stretch.arrival_s * (self.stretch.rate_per_s / rate)
        later = np.round(self.stretch.output_tokens * rng.choice(self.ratios, n)).astype(np.int64)
        outputs = np.stack([self.stretch.output_tokens, np.maximum(1, later)], axis=1)
        every = np.tile(np.arange(n), times)
        requests = JudgedSample(
            TIERS,
            self.stretch.input_tokens[every],
            outputs[every],
            self.scores[rows][every],
            self.predicted[rows][every],
            known_quality=self.quality[rows][every],
        )
        begins_s = np.repeat(np.arange(times), n) * (arrival_s[-1] + 1 / rate)
        return Demand(requests, requests, np.tile(arrival_s, times) + begins_s)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """quality: the mean of a request. p95_s: end to end. visited: the share of requests by tier."""

    quality: float
    p95_s: float
    visited: tuple[float, ...]


Replicas = Sequence[Sequence[Replica]]


def routing(
    threshold: float = 0.0, skip_below: float | None = None, price: float = 0.0, long_answers: int | None = None
) -> PricedRouting:
    """long_answers: from so many tokens on, answers are accepted; None: length does not matter."""
    rule = None if long_answers is None else LongAnswers(long_answers, 0.0)
    first = TierPlan(TIERS[0], "", threshold, 1, skip_below=skip_below, long_answers=rule)
    return PricedRouting((first, TierPlan(TIERS[1], "", None, 1)), Price(price))


def at_threshold(rule: PricedRouting, threshold: float) -> PricedRouting:
    first, last = rule.tiers
    return replace(rule, tiers=(replace(first, threshold=threshold), last))


def served(demand: Demand, rule: PricedRouting, replicas: Replicas) -> Served:
    run = simulate_priced(demand, rule, replicas, JUDGE_S)
    shares = tuple(round(float(of.mean()), 4) for of in run.visited)
    return Served(float(run.quality.mean()), float(np.percentile(run.total_s, 95)), shares)


def sides(models: Family, trace: Workload, seed: int, requests: int) -> tuple[Side, Side]:
    """(to fit on, to report)."""
    columns = [models.tiers.index(tier) for tier in TIERS]
    rng = np.random.default_rng(seed)
    quality = models.quality[:, columns]
    observed = quality / 100 + rng.normal(0, JUDGE_ERROR, quality.shape)
    prior = quality.mean(axis=0) / 100
    scores = 100 / (1 + np.exp((0.5 - observed) / JUDGE_ERROR**2 - np.log(prior / (1 - prior))))
    fitted, other = np.array_split(rng.permutation(len(quality)), 2)
    trained = train([models.texts[row] for row in fitted], TIERS, quality[fitted], penalties=PENALTIES)
    unseen = [[*trained.predictor.predict(models.texts[row]).values()] for row in other]
    parts = [(fitted, trained.predicted), (other, np.array(unseen))]
    result, ratios = [], length_ratios()
    stretch = stretch_of(trace, min(requests, len(trace)), seed, None)
    for rows, predicted in parts:
        result.append(Side(quality[rows], scores[rows], predicted, stretch, ratios, seed))
    return result[0], result[1]


def length_ratios() -> Floats:
    """By how much answers of a larger model are longer than those of a smaller one, to the same prompts; 1 on average."""
    with gzip.open(public(LENGTH_RATIOS), "rt") as file:
        rows = [(float(row["small_output_tokens"]), float(row["large_output_tokens"])) for row in csv.DictReader(file)]
    ratios = np.clip([large / small for small, large in rows if small and large], 0.25, 4.0)
    return np.asarray(ratios / ratios.mean())


def deployment(models: Family, trace: Workload, gpus: int, shares: Sequence[float]) -> tuple[Replicas, list[str]]:
    """(replicas by tier, in words): those that sustain the highest rate where these shares of requests ask each tier."""
    site = models.site.only([models.tiers.index(tier) for tier in TIERS])
    lengths, kinds = trace.mean_tokens[:2], list[Replica]()
    longest = int((trace.input_tokens + MOST_TIMES * trace.output_tokens).max())
    for tier in range(len(TIERS)):
        fit = [kind for kind in replica_kinds(site, tier, gpus, longest)[0] if has_one_batch(kind.shape)]
        kinds.append(max(fit, key=lambda kind: kind.capacity_per_s(*lengths) / kind.shape.gpus))
    small, large = kinds

    def sustains(count: int) -> float:
        others = (gpus - count * small.shape.gpus) // large.shape.gpus
        return min(
            count * small.capacity_per_s(*lengths) / shares[0], others * large.capacity_per_s(*lengths) / shares[1]
        )

    count = max(range(1, gpus // small.shape.gpus + 1), key=sustains)
    others = (gpus - count * small.shape.gpus) // large.shape.gpus
    return [[small] * count, [large] * others], [f"{count} x {small.shape}", f"{others} x {large.shape}"]


def least_threshold(reaches: Callable[[float], bool]) -> float | None:
    """The least threshold that reaches the quality; None where none does. Over HIGHEST_THRESHOLDS, quality falls again."""
    low, high = 0.0, next(filter(reaches, HIGHEST_THRESHOLDS), None)
    if high is None:
        return None
    while high - low > THRESHOLD_PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def fitted_rule(
    demand: Demand, replicas: Replicas, target: float, rules: Sequence[PricedRouting]
) -> tuple[float, PricedRouting]:
    """(p95, the routing with the least p95), of these with the least threshold that reaches the target's quality."""
    fitted = list[tuple[float, PricedRouting]]()
    for rule in rules:

        def reaches(threshold: float, rule: PricedRouting = rule) -> bool:
            return served(demand, at_threshold(rule, threshold), replicas).quality >= target

        if (threshold := least_threshold(reaches)) is not None:
            chosen = at_threshold(rule, threshold)
            fitted.append((served(demand, chosen, replicas).p95_s, chosen))
    return min(fitted, key=lambda each: each[0], default=(math.inf, routing()))


def capacity_per_s(side: Side, rule: PricedRouting, replicas: Replicas, guess: float) -> float:
    """The highest rate at which the backlog does not grow, by bisection. guess: from a third of it to it."""
    n, low, high = len(side.stretch), guess / 3, guess
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        total_s = simulate_priced(side.demand(middle, 2), rule, replicas, JUDGE_S).total_s
        low, high = (middle, high) if total_s[n:].mean() <= GROWTH * total_s[:n].mean() else (low, middle)
    return float(low)


def measure(name: str, seed: int, requests: int) -> dict[str, Any]:
    """The cell of a trace and a seed."""
    models = family(FAMILY)
    trace = read_trace(public(f"traces/{name}.csv.gz"))
    known, unseen = sides(models, trace, seed, requests)
    idle = known.demand(1.0).requests
    worst, best = (most(route(idle, (threshold,)).quality for threshold in range(0, 101, 5)) for most in (min, max))
    target = worst + TARGET_SHARE * (best - worst)
    threshold = least_threshold(lambda t: route(idle, (t,)).quality >= target)
    assert threshold is not None
    shares = route(idle, (threshold,)).processed.mean(axis=1)
    replicas, words = deployment(models, trace, GPUS, shares.tolist())
    of_mean = (float(of[0].capacity_per_s(*trace.mean_tokens[:2]) * len(of)) for of in replicas)
    guess = 1.5 * min(rate / share for rate, share in zip(of_mean, shares, strict=True))
    capacity = capacity_per_s(known, routing(threshold), replicas, guess)
    limits = [None, *(float(q) for q in np.quantile(known.predicted[:, 0], SKIP_SHARES))]
    lengths = np.quantile(trace.output_tokens, LONG_SHARES)
    cell: dict[str, Any] = {"trace": name, "seed": seed, "target_quality": target, "replicas": words}
    cell |= {"capacity_per_s": capacity, "loads": []}
    at_high_load = list[PricedRouting]()
    for load in LOADS:
        demand, others = known.demand(load * capacity), unseen.demand(load * capacity)
        least = fitted_rule(demand, replicas, target, [routing(skip_below=limit) for limit in limits])
        fixed = least[1]
        near = dict.fromkeys((None, fixed.tiers[0].skip_below))
        with_price = [routing(skip_below=limit, price=price) for price in PRICES for limit in near]
        priced = min(least, fitted_rule(demand, replicas, target, with_price), key=lambda each: each[0])[1]
        alone = fitted_rule(demand, replicas, target, [routing(long_answers=int(tokens)) for tokens in lengths])
        together = [routing(price=price, long_answers=int(tokens)) for price in PRICES for tokens in lengths]
        both = min(alone, fitted_rule(demand, replicas, target, together), key=lambda each: each[0])[1]
        at_high_load = at_high_load or [fixed, priced]
        ways = {
            "fixed": fixed,
            "priced": priced,
            "long answers": alone[1],
            "both": both,
            "kept fixed": at_high_load[0],
            "kept priced": at_high_load[1],
        }
        cell["loads"].append({"load": load} | {way: _row(rule, others, replicas) for way, rule in ways.items()})
    print(cell, flush=True)
    return cell


def _row(rule: PricedRouting, demand: Demand, replicas: Replicas) -> dict[str, Any]:
    of = served(demand, rule, replicas)
    first = rule.tiers[0]
    return {
        "threshold": first.threshold,
        "skip_below": first.skip_below,
        "price": rule.price.per_s,
        "quality": round(of.quality, 3),
        "p95_s": round(of.p95_s, 3),
        "visited": of.visited,
    }


def summarised(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By trace and load: p95 with the price over that with fixed limits, and the points of quality more, over the seeds."""
    lines = []
    for name, load in dict.fromkeys((cell["trace"], of["load"]) for cell in cells for of in cell["loads"]):
        rows = [of for cell in cells if cell["trace"] == name for of in cell["loads"] if of["load"] == load]
        for fixed, priced in WAYS:
            ratios = [row[priced]["p95_s"] / row[fixed]["p95_s"] for row in rows]
            points = [row[priced]["quality"] - row[fixed]["quality"] for row in rows]
            p95_s = {way: round(float(np.mean([row[way]["p95_s"] for row in rows])), 2) for way in (fixed, priced)}
            line = {"trace": name, "load": load, "way": priced, "p95_s": p95_s}
            lines.append(line | {"p95_ratio": interval(ratios), "quality_difference": interval(points)})
    return lines


def write(cells: Sequence[dict[str, Any]], requests: int) -> None:
    """Write the results, and print a line for each trace and load."""
    lines = summarised(cells)
    for line in lines:
        ratio, points = line["p95_ratio"], line["quality_difference"]
        print(
            f"{line['trace']:28} {line['load']:.1f} {line['way']:12} p95 {ratio['mean']:.2f} [{ratio['low']:.2f}, "
            f"{ratio['high']:.2f}], quality {points['mean']:+.2f}"
        )
    figures = {"requests": requests, "judge_error": JUDGE_ERROR, "prices": PRICES, "summary": lines, "cells": cells}
    print(report.write("skipping_under_load", figures))


def run(*, quick: bool = False) -> None:
    """Raises:
    DataMissing: A trace or the family is not there.
    """
    requests, seeds = (QUICK_REQUESTS, QUICK_SEEDS) if quick else (REQUESTS, SEEDS)
    with ProcessPoolExecutor() as pool:
        jobs = [pool.submit(measure, name, seed, requests) for name in TRACES for seed in seeds]
        write([job.result() for job in jobs], requests)
