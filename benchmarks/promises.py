"""What plans promise, kept or not where they have not looked: other prompts, the other half of the trace, other seeds.

Families are all tables of judged answers in the folder that PENSTOCK_DATA names. Per family and split, `penstock plan`'s own
code plans on one half of the prompts and one half of a recorded trace, for the default question: the least cost of a least
quality, at a latency near that of the largest model alone. The plan is then routed and replayed with the other half of both.
Then the halves of the prompts change places: which half is the easier one is luck, and so it cancels.

A promise of quality *binds* where the plan has hardly more than it needs. `chance`: what a promise costs at least, the share
of a normal distribution at the confidence times the standard error of the difference between the halves.
"""

from collections.abc import Sequence
from itertools import product
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.public_data import public
from benchmarks.rivals.families import Family, measured
from benchmarks.spread import interval
from penstock.planner_service.api.plans import Planned, plan_for
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.question.demand import demand_of
from penstock.planner_service.question.planning_options import Options
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.quality import JudgedSample, answered_quality
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import Workload
from penstock.services.domain.errors import InvalidRequest
from penstock.types.planning import PlanningQuestion

TRACES = ("traces/azure2023_conv.csv.gz", "traces/azure2023_code_first_half.csv.gz")
SHARES = (0.25, 0.5, 0.75)  # of the way from the first tier's quality to the last one's
SPLITS, QUICK_SPLITS = range(12), range(2)
REPLAYS = 5
RATE_PER_S = 40.0
CONFIDENCE = PlanningQuestion().confidence
BINDS = 0.5  # points that a plan has at most more than it needs


def measure(family: Family, split: int) -> list[dict[str, Any]]:
    """A row for each target and half."""
    assert CONFIDENCE is not None
    order = np.random.default_rng(split).permutation(len(family.quality))
    halves = [family.judged(rows) for rows in np.array_split(order, 2)]
    trace, rest = _halves(read_trace(public(TRACES[split % len(TRACES)])), split)
    rows = []
    for share, half in product(SHARES, (0, 1)):
        judged, others = halves[half], halves[1 - half]
        target = judged.worst + share * (judged.best - judged.worst)
        row = {"family": family.name, "split": split, "half": half, "share": share, "target": target}
        options = Options(min_quality=target, confidence=CONFIDENCE, rate=RATE_PER_S)
        try:
            planned = plan_for(family.site, trace, judged, options)
        except (Unreachable, InvalidRequest) as error:
            rows.append(row | {"refused": str(error)})
            continue
        rows.append(row | _quality(planned, others, target) | _latency(planned, others, rest))
    return rows


def _halves(trace: Workload, split: int) -> Sequence[Workload]:
    first, second = (trace.subset(rows) for rows in np.array_split(np.arange(len(trace)), 2))
    return (first, second) if split // len(TRACES) % 2 == 0 else (second, first)


def _quality(planned: Planned, others: JudgedSample, target: float) -> dict[str, Any]:
    plan = planned.plan
    assert plan.promise is not None
    names = [tier.name for tier in plan.tiers]
    served = others.only([others.tiers.index(name) for name in names])
    answered = answered_quality(served, plan.thresholds)
    chance = NormalDist().inv_cdf(plan.promise.confidence) * float(answered.std()) * np.sqrt(2 / len(answered))
    return {
        "gpus": plan.gpus,
        "form": [tier.name for tier in plan.tiers if tier.strategy.used],
        "quality": plan.quality,
        "least_quality": plan.promise.least_quality,
        "quality_unseen": float(answered.mean()),
        "binds": plan.promise.least_quality < target + BINDS,
        "chance": float(chance),
    }


def _latency(planned: Planned, others: JudgedSample, rest: Workload) -> dict[str, Any]:
    """Replays as long as the plan's other stretches, or of as many requests as the other half of the trace has."""
    plan, options = planned.plan, planned.options
    assert options.rate is not None
    served = others.only([others.tiers.index(tier.name) for tier in plan.tiers])
    strategies = [tier.strategy for tier in plan.tiers]
    replayed = []
    for seed in range(REPLAYS):
        count = min(round(plan.runs_s * options.rate), len(rest))
        demand = demand_of(rest, served, requests=count, seed=1000 + seed, lengths="quality", rate=options.rate)
        run = run_cascade(planned.site, demand, plan.thresholds, strategies, plan.dispatch)
        replayed.append(float(run.latency_s(plan.objective, plan.percentile)))
    return {"p95_s": plan.felt_s, "p95_limit_s": options.max_latency_s, "p95_replayed_s": replayed}


def summarised(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    planned = [row for row in rows if "refused" not in row]
    bound = [row for row in planned if row["binds"]]
    pairs = [(row["p95_s"], value) for row in planned for value in row["p95_replayed_s"]]
    limits = [value <= row["p95_limit_s"] for row in planned for value in row["p95_replayed_s"]]
    more = [row["quality_unseen"] - row["target"] for row in bound]
    return {
        "plans": len(planned),
        "refused": len(rows) - len(planned),
        "quality_holds": np.mean([row["quality_unseen"] >= row["target"] for row in planned]),
        "bound": len(bound),
        "quality_holds_where_bound": np.mean([value >= 0 for value in more]) if more else None,
        "overshoot_where_bound": interval(more) if len(more) > 1 else None,
        "chance_where_bound": np.mean([row["chance"] for row in bound]) if bound else None,
        "p95_limit_holds": np.mean(limits),
        "p95_holds": np.mean([value <= promised for promised, value in pairs]),
        "p95_replayed_over_promised": np.mean([value / promised for promised, value in pairs]),
    }


def run(_: int) -> None:
    """Nothing here is timed: one round is all."""
    _run(SPLITS)


def run_quick(_: int) -> None:
    _run(QUICK_SPLITS)


def _run(splits: Sequence[int]) -> None:
    rows = [row for part in measured(measure, splits) for row in part]
    names = list(dict.fromkeys(row["family"] for row in rows))
    by_family = {name: summarised([row for row in rows if row["family"] == name]) for name in names}
    whole = summarised(rows)
    for name, summary in {**by_family, "all": whole}.items():
        print(f"{name[:30]:30} {summary}", flush=True)
    figures = {"confidence": CONFIDENCE, "splits": list(splits), "rate_per_s": RATE_PER_S, "replays": REPLAYS}
    print(report.write("promises", {**figures, "summary": whole, "families": by_family, "rows": rows}))
