"""What prefix reuse changes in plans: the Mooncake trace of an hour of chats, with prefix caches of several sizes.

First the share of prompt tokens that a cache of so many tokens has, over the whole trace. Then plans for eight H100 and the
Qwen2.5 cascade of the examples, with the trace's lengths and the example's judged prompts: the highest rate within a quality
and a latency, and the fewest GPUs at the rate that all eight sustain without reuse. Three stretches of the trace.
"""

import statistics
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.mooncake import from_mooncake
from benchmarks.public_data import public
from benchmarks.spread import median_and_range
from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.planning.plan_cascade import plan_cascade
from penstock.planner_service.question.demand import demand_of
from penstock.planner_service.question.planning_options import Goal, Options
from penstock.planner_service.simulator import Workload
from penstock.types.planning import Objective
from tests.support.inputs import read_quality, read_site

EXAMPLES = Path("examples")
TRACE = "traces/mooncake_conversation.csv.gz"
WITHOUT, UNLIMITED = "without", 10**12
CACHES = {"0.2 million": 200_000, "1 million": 1_000_000, "5 million": 5_000_000, "unlimited": UNLIMITED}  # tokens
SEEDS, REQUESTS = (1, 2, 3), 500
QUALITY_SHARE = 0.8  # of the way from the first tier's quality to the last's
MAX_LATENCY_S = 30.0  # p95 end to end


def plan(work: Workload, seed: int, goal: Goal, rate: float | None) -> CascadePlan:
    """A plan for a stretch of the trace."""
    site = read_site(EXAMPLES / "cluster-1x8-h100.yaml", EXAMPLES / "qwen2.5-cascade.yaml")
    judged = read_quality(EXAMPLES / "judged.csv", site.tiers)
    options = Options(
        min_quality=judged.worst + QUALITY_SHARE * (judged.best - judged.worst),
        max_latency_s=MAX_LATENCY_S,
        goal=goal,
        objective=Objective.END_TO_END,
    )
    demand = demand_of(work, judged, requests=REQUESTS, seed=seed, lengths="trace", rate=rate)
    return plan_cascade(site, demand, options)


def stretch(works: dict[str, Workload], seed: int) -> list[dict[str, Any]]:
    """The plans of one stretch, by cache."""
    rows, before = [], 0.0
    for name, work in works.items():
        fast = plan(work, seed, Goal.RATE, None)
        assert fast.rate_per_s is not None
        before = before or fast.rate_per_s
        lean = plan(work, seed, Goal.COST, before)
        rows.append(
            {
                "seed": seed,
                "cache": name,
                "cached_share": fast.cached_share,
                "rate_per_s": fast.rate_per_s,
                "rate_ratio": fast.rate_per_s / before,
                "gpus": lean.gpus,
                "p95_s": fast.felt_s,
                "shares": [tier.share_processed for tier in fast.tiers],
                "replicas": [str(tier.strategy) for tier in fast.tiers],
            }
        )
        row = rows[-1]
        print(
            f"seed {seed}, {name}: {row['cached_share']:.1%} cached, {row['rate_per_s']:.2f} requests/s "
            f"({row['rate_ratio']:.2f} of without), {row['gpus']} GPUs at {before:.2f}/s",
            flush=True,
        )
    return rows


def run(_rounds: int) -> None:
    path = public(TRACE)
    cached = {name: from_mooncake(path, tokens).requests for name, tokens in CACHES.items()}
    whole = {name: float(work.cached_tokens.sum() / work.input_tokens.sum()) for name, work in cached.items()}
    for name, share in whole.items():
        print(f"{name} tokens: {share:.1%} of the prompt tokens of the trace are cached", flush=True)
    works = {WITHOUT: cached["unlimited"].uncached(), **cached}
    rows = [row for seed in SEEDS for row in stretch(works, seed)]
    ratios = {name: [row["rate_ratio"] for row in rows if row["cache"] == name] for name in CACHES}
    for name, values in ratios.items():
        print(f"{name}: {statistics.median(values):.2f} times the rate")
    figures = {
        "trace": TRACE,
        "seeds": SEEDS,
        "requests": REQUESTS,
        "max_latency_s": MAX_LATENCY_S,
        "quality_share": QUALITY_SHARE,
        "cached_share": whole,
        "plans": rows,
    }
    written = report.write("prefix_reuse", figures)
    series = {"rate": [median_and_range(values) for values in ratios.values()]}
    title = "Rate of a plan for 8 H100 with prefix reuse"
    plot = report.bars("prefix_reuse", title, list(CACHES), series, "times the rate without reuse")
    print(f"{written}\n{plot}")
