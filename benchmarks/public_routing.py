"""Skip rules and direct routing on public judged answers, by what their tables publish of a prompt.

The tables have no prompts, so the score predictor cannot read them. What they have is a prompt's length and the collection it
is from. Scores are predicted from these by ridge regression: a poor stand-in, and this benchmark shows how poor.

Per family, target and split: thresholds alone, thresholds with a skip rule, and direct routing (each prompt to the first tier
whose predicted score is high enough, no judge: RouteLLM's idea) are chosen on one half of the prompts for the least GPU time
at the quality that is wanted, by arithmetic on A100s, and compared on the other half. Figures are means over splits with
intervals (Student's t).
"""

import csv
import gzip
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cascade_systems, report
from benchmarks.cascade import FAMILIES, SHARES, TIERS, Family, site_of
from benchmarks.cascade_systems import gpu_s
from benchmarks.public_data import public
from benchmarks.spread import interval
from planner_service.files import read_quality
from planner_service.routing.quality import JudgedSample, Routed, route
from planner_service.simulator import Replica
from planner_service.simulator.workload import Floats, Ints

SPLITS = range(1, 11)
PENALTY, FOLDS = 3.0, 5
QUANTILES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of predicted scores: limits that are tried
Kinds = Sequence[Sequence[Replica]]
WAYS = ("thresholds", "skip rule", "direct")


def features(path: Path) -> Floats:
    """(N, F) of a table: powers of the logarithm of the prompt's tokens, and which collection it is from."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    tokens = np.log1p([float(row["input_tokens"]) for row in rows])
    sources = [row["dataset"] for row in rows]
    of_source = [np.array([one == name for one in sources], np.float64) for name in sorted(set(sources))[1:]]
    return np.stack([np.ones(len(rows)), tokens, tokens**2, *of_source], axis=1)


def predicted(known: Floats, scores: Floats, others: Floats) -> Floats:
    """(M, C) scores, 0 to 100, of other prompts. known (N, F), scores (N, C), others (M, F)."""
    centre, scale = known.mean(axis=0), known.std(axis=0)
    centre[0], scale[scale == 0] = 0.0, 1.0
    fitted, new = (known - centre) / scale, (others - centre) / scale
    penalty = PENALTY * np.eye(fitted.shape[1])
    penalty[0, 0] = 0.0
    weights = np.linalg.solve(fitted.T @ fitted + penalty, fitted.T @ scores)
    expected: Floats = np.clip(new @ weights, 0.0, 100.0)
    return expected


def cross_predicted(of: Floats, scores: Floats, seed: int) -> Floats:
    """(N, C) scores of the prompts themselves, each by a model of the other folds."""
    result = np.empty_like(scores)
    for fold in np.array_split(np.random.default_rng(seed).permutation(len(scores)), FOLDS):
        others = np.setdiff1d(np.arange(len(scores)), fold)
        result[fold] = predicted(of[others], scores[others], of[fold])
    return result


def auc(values: Floats, good: "np.ndarray[Any, np.dtype[np.bool_]]") -> float | None:
    """The probability that a good one has the higher value; ties count half. None where all are alike."""
    if good.all() or not good.any():
        return None
    above = (values[good][:, None] > values[~good][None]).mean()
    return float(above + (values[good][:, None] == values[~good][None]).mean() / 2)


def cheapest(judged: JudgedSample, target: float, kinds: Kinds) -> tuple[float, tuple[float, ...]]:
    """(cost, thresholds) of that quality."""
    able = cascade_systems.lowest_thresholds(judged, target)
    return min(((gpu_s(judged, route(judged, one).processed, kinds), one) for one in able), default=(math.inf, ()))


def limits_of(judged: JudgedSample, tier: int) -> list[float]:
    assert judged.predicted is not None
    return [float(q) for q in np.quantile(judged.predicted[:, tier], QUANTILES)]


def direct(judged: JudgedSample, limits: Sequence[float]) -> Routed:
    """Each prompt to the first tier whose predicted score is at least its limit, else to the last."""
    assert judged.predicted is not None
    able = np.column_stack([judged.predicted[:, :-1] >= np.array(limits), np.ones(len(judged), np.bool_)])
    answered: Ints = np.argmax(able, axis=1).astype(np.int64)
    processed = np.arange(len(TIERS))[:, None] == answered[None]
    return Routed(processed, answered, float(judged.quality[np.arange(len(judged)), answered].mean()))


def every_limit(judged: JudgedSample) -> Iterator[tuple[float, ...]]:
    bounds = [[-1.0, *limits_of(judged, tier), 101.0] for tier in range(len(TIERS) - 1)]
    yield from itertools.product(*bounds)


def measure(family: Family, split: int) -> list[dict[str, Any]]:
    """The rows of a family and a split: one for each target."""
    judged, of = read_quality(public(family.quality), TIERS), features(public(family.quality))
    first, second = np.array_split(np.random.default_rng(split).permutation(len(judged)), 2)
    scores = judged.scores[first]
    fit = replace(judged.subset(first), predicted=cross_predicted(of[first], scores, split))
    other = replace(judged.subset(second), predicted=predicted(of[first], scores, of[second]))
    kinds, rows = cascade_systems.kinds_for(site_of(family), judged), []
    for share in SHARES:
        target = fit.worst + share * (fit.best - fit.worst)
        cost, thresholds = cheapest(fit, target, kinds)
        plain = thresholds
        rule: tuple[float | None, ...] = (None,) * (len(TIERS) - 1)
        for tier in range(len(TIERS) - 1):
            for limit in limits_of(fit, tier):
                tried = (*rule[:tier], limit, *rule[tier + 1 :])
                skipping_cost, of_rule = cheapest(fit.skipping(tried), target, kinds)
                if skipping_cost < cost:
                    cost, thresholds, rule = skipping_cost, of_rule, tried
        able = [limits for limits in every_limit(fit) if direct(fit, limits).quality >= target]
        limits = min(able, key=lambda one: gpu_s(fit, direct(fit, one).processed, kinds))
        skipping = other.skipping(rule)
        ways = zip(WAYS, (route(other, plain), route(skipping, thresholds), direct(other, limits)), strict=True)
        assert other.predicted is not None
        rows.append(
            {
                "family": family.name,
                "share": share,
                "split": split,
                "min_quality": target,
                "skip_below": rule,
                "auc": [
                    auc(other.predicted[:, t], other.scores[:, t] >= h) if h <= 100 else None
                    for t, h in enumerate(plain)
                ],
                **{
                    way: {"gpu_s": gpu_s(other, routed.processed, kinds), "quality": routed.quality}
                    for way, routed in ways
                },
            }
        )
    return rows


def run(_: int) -> None:
    """Nothing here is timed: one round is all."""
    with ProcessPoolExecutor() as pool:
        jobs = [pool.submit(measure, family, split) for family in FAMILIES for split in SPLITS]
        rows = [row for job in jobs for row in job.result()]
    summary = []
    for family, share in dict.fromkeys((row["family"], row["share"]) for row in rows):
        of = [row for row in rows if (row["family"], row["share"]) == (family, share)]
        known = [one for row in of for one in row["auc"] if one is not None]
        line: dict[str, Any] = {"family": family, "share": share, "auc": statistics.mean(known) if known else None}
        for way in WAYS[1:]:
            logs = interval([math.log(row[way]["gpu_s"] / row["thresholds"]["gpu_s"]) for row in of])
            points = interval([row[way]["quality"] - row["thresholds"]["quality"] for row in of])
            line[way] = {
                "gpu_s_over_thresholds": {key: math.exp(logs[key]) for key in ("mean", "low", "high")},
                "quality_difference": {key: points[key] for key in ("mean", "low", "high")},
            }
        summary.append(line)
        print(line, flush=True)
    print(report.write("public_routing", {"splits": list(SPLITS), "summary": summary, "rows": rows}))
