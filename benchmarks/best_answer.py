"""What the best answer of a request as its reply is worth, with a judge that errs, on public judged answers.

What the public tables have of an answer is one judge's score, which the other benchmarks take for its quality. A plan that
delivers the answer with the highest score gains most from that: part of what it gains may be error of the scores. So here the
quality is the table's score, and what routers decide by is that score with an error: normal, with the standard deviations of
ERRORS in points, drawn for each answer by itself, within 0 to 100.

Per family, target, error and split: thresholds are chosen on one half of the prompts for the least GPU time at the wanted
quality, by arithmetic on A100s, once with last answers and once with best ones, and compared on the other half. Figures are
means over splits with intervals (Student's t).
"""

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import cascade_systems, report
from benchmarks.cascade import FAMILIES, SHARES, TIERS, Family, site_of
from benchmarks.cascade_systems import gpu_s
from benchmarks.public_data import public
from benchmarks.spread import interval
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.simulator import Replica
from penstock.types.rules import AcceptanceRules
from tests.support.inputs import read_quality

SPLITS = range(1, 11)
ERRORS = (0.0, 5.0, 10.0, 20.0)
BEST = AcceptanceRules(best_answer=True)


def erring(judged: JudgedSample, error: float, seed: int) -> JudgedSample:
    """The same answers with scores that err; what they are worth stays."""
    drawn = np.random.default_rng(seed).normal(0.0, error, judged.scores.shape) if error else 0.0
    return replace(judged, scores=np.clip(judged.scores + drawn, 0.0, 100.0), known_quality=judged.scores)


def cheapest(judged: JudgedSample, target: float, kinds: Sequence[Sequence[Replica]]) -> tuple[float, ...]:
    """The thresholds of the least GPU time of that quality."""
    able = cascade_systems.lowest_thresholds(judged, target)
    return min(able, key=lambda one: gpu_s(judged, route(judged, one).processed, kinds))


def measure(family: Family, split: int) -> list[dict[str, Any]]:
    """The rows of a family and a split: one for each target and error."""
    judged = read_quality(public(family.quality), TIERS)
    halves = np.array_split(np.random.default_rng(split).permutation(len(judged)), 2)
    kinds, rows = cascade_systems.kinds_for(site_of(family), judged), []
    for error in ERRORS:
        fit, other = (erring(judged, error, split).subset(half) for half in halves)
        for share in SHARES:
            target = fit.worst + share * (fit.best - fit.worst)
            row: dict[str, Any] = {"family": family.name, "share": share, "split": split, "error": error}
            for way, fitted, held_out in (("last", fit, other), ("best", fit.under(BEST), other.under(BEST))):
                thresholds = cheapest(fitted, target, kinds)
                routed = route(held_out, thresholds)
                earlier = routed.answered < len(TIERS) - 1 - routed.processed[::-1].argmax(axis=0)
                row[way] = {
                    "gpu_s": gpu_s(held_out, routed.processed, kinds),
                    "quality": routed.quality,
                    "earlier_answers": float(earlier.mean()),
                }
            rows.append(row)
    return rows


def summarised(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By family, target and error: the GPU time and the quality with best answers, over those with last ones."""
    summary = []
    for family, share, error in dict.fromkeys((row["family"], row["share"], row["error"]) for row in rows):
        of = [row for row in rows if (row["family"], row["share"], row["error"]) == (family, share, error)]
        logs = interval([math.log(row["best"]["gpu_s"] / row["last"]["gpu_s"]) for row in of])
        points = interval([row["best"]["quality"] - row["last"]["quality"] for row in of])
        summary.append(
            {
                "family": family,
                "share": share,
                "error": error,
                "gpu_s_over_last": {key: math.exp(logs[key]) for key in ("mean", "low", "high")},
                "quality_difference": {key: points[key] for key in ("mean", "low", "high")},
                "earlier_answers": float(np.mean([row["best"]["earlier_answers"] for row in of])),
            }
        )
    return summary


def run(_: int) -> None:
    """Nothing here is timed: one round is all."""
    with ProcessPoolExecutor() as pool:
        jobs = [pool.submit(measure, family, split) for family in FAMILIES for split in SPLITS]
        rows = [row for job in jobs for row in job.result()]
    summary = summarised(rows)
    for line in summary:
        print(line, flush=True)
    print(report.write("best_answer", {"splits": list(SPLITS), "errors": ERRORS, "summary": summary, "rows": rows}))
