"""How long planning takes, by the number of GPUs: three tiers, as `penstock plan` does it, warm code.

The load grows with the cluster (a request per second for four GPUs), so that every cluster is about equally busy.
Example data and the DeepSeek cascade of the examples; three quality targets each. A plan is for a
stretch of 20 latencies, keeps within the usual utilisation and is run on five other stretches.

A plan that takes longer than its limit is ended and counts as missed. Clusters over REPEATED_UP_TO are planned once, not
in every round, and results are written after each plan: the whole takes about ten minutes.
"""

import contextlib
import dataclasses
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.spread import median_and_range
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.planning.horizon import plan_over_horizon
from penstock.planner_service.planning.plan_cascade import plan_cascade
from penstock.planner_service.question.demand import demand_of
from penstock.planner_service.question.planning_options import Goal, Options
from penstock.planner_service.question.site import Demand, Site
from penstock.types.planning import Objective
from tests.support.inputs import read_quality, read_site

EXAMPLES = Path("examples")
LIMITS_S = {16: 10.0, 32: 10.0, 80: 30.0, 256: 60.0, 1024: 90.0}  # by GPUs, after which a plan is ended
TARGETS_S = {32: 3.0, 80: 10.0, 1024: 90.0}
REPEATED_UP_TO = 80  # GPUs
SHARES = (0.3, 0.6, 0.9)  # of the way from the first tier's quality to the last's
SEED = 1

Times = list[float]


def planned(site: Site, options: Options, demand: Demand, runs: Sequence[Demand]) -> CascadePlan:
    return plan_cascade(site, demand, options, runs=runs)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread once so much time has passed."""

    def stop(_signal: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def cells() -> list[tuple[Objective, int, float]]:
    """What is planned: objective, GPUs and share of the quality, small clusters first."""
    return [(objective, gpus, share) for gpus in LIMITS_S for objective in Objective for share in SHARES]


def timed(plan: Callable[[], CascadePlan], rounds: int, limit_s: float) -> tuple[CascadePlan | None, Times, Times]:
    """(the plan, seconds and CPU seconds of each round); None, and those until then, where one took longer than the limit."""
    result, times, cpu_times = None, list[float](), list[float]()
    for _ in range(rounds):
        began, cpu_began = time.perf_counter(), time.process_time()
        try:
            with within(limit_s):
                result = plan()
        except TimeoutError:
            result = None
        times.append(time.perf_counter() - began)
        cpu_times.append(time.process_time() - cpu_began)
        if result is None:
            break
    return result, times, cpu_times


def row(objective: Objective, gpus: int, share: float, rounds: int) -> dict[str, Any]:
    """One cell, measured."""
    base = read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")
    judged = read_quality(EXAMPLES / "judged.csv", base.tiers)
    trace = read_trace(EXAMPLES / "trace.csv")
    site = dataclasses.replace(base, cluster=dataclasses.replace(base.cluster, nodes=gpus // 8))
    target = judged.worst + share * (judged.best - judged.worst)
    options = Options(min_quality=target, goal=Goal.LATENCY, objective=objective, seed=SEED, rate=gpus / 4)

    def plan() -> CascadePlan:
        return plan_over_horizon(partial(planned, site, options), site, trace, judged, options)[0]

    cascade_plan, times, cpu_times = timed(plan, rounds if gpus <= REPEATED_UP_TO else 1, LIMITS_S[gpus])
    figures: dict[str, Any] = {
        "gpus": gpus,
        "objective": objective.value,
        "min_quality": round(target, 2),
        "missed": cascade_plan is None,
        "limit_s": LIMITS_S[gpus],
        "seconds": times,
        "cpu_seconds": cpu_times,
    }
    begin = f"{gpus:>5} GPUs, {objective.value}, quality {target:.1f}"
    if cascade_plan is None:
        print(f"{begin}: missed: over {LIMITS_S[gpus]:g} s ({cpu_times[-1]:.2f} s CPU)", flush=True)
        return figures
    assert cascade_plan.felt_interval is not None
    figures |= {
        "requests": cascade_plan.requests,
        "latencies": cascade_plan.seconds / cascade_plan.felt_s,
        "routings": cascade_plan.solution.evaluations,
        "simulations": cascade_plan.simulations,
        "proof": cascade_plan.solution.proof.value,
        "gap": cascade_plan.solution.gap,
        "p95_s": cascade_plan.felt_s,
        "interval_s": [cascade_plan.felt_interval.low, cascade_plan.felt_interval.high],
        "gpus_used": cascade_plan.gpus,
    }
    work = (
        ", ".join(f"{figures[what]} {what}" for what in ("requests", "routings", "simulations"))
        + f", {figures['proof']}"
    )
    took = f"{statistics.median(times):6.2f} s ({statistics.median(cpu_times):.2f} s CPU)"
    print(f"{begin}: {took}  {work}", flush=True)
    return figures


def run(rounds: int) -> None:
    base = read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")
    plan_cascade(  # compile
        base,
        demand_of(
            read_trace(EXAMPLES / "trace.csv"),
            read_quality(EXAMPLES / "judged.csv", base.tiers),
            requests=50,
            seed=SEED,
            lengths="quality",
            rate=4.0,
        ),
        Options(min_quality=70.0, goal=Goal.LATENCY),
    )
    rows: list[dict[str, Any]] = []
    for cell in cells():
        rows.append(row(*cell, rounds))
        figures = {"seed": SEED, "runs": Options().runs, "rounds": rounds, "targets_s": TARGETS_S, "rows": rows}
        path = report.write("planner", {"complete": len(rows) == len(cells()), **figures})
    for gpus, target_s in TARGETS_S.items():
        slowest_s = max(max(one["seconds"]) for one in rows if one["gpus"] == gpus)
        is_met = slowest_s <= target_s and not any(one["missed"] for one in rows if one["gpus"] == gpus)
        print(f"{gpus:>5} GPUs: at most {slowest_s:.1f} s, target {target_s:g} s: {'met' if is_met else 'missed'}")
    by_gpus = {gpus: [s for one in rows if one["gpus"] == gpus for s in one["seconds"]] for gpus in LIMITS_S}
    series = {"seconds": [median_and_range(s) for s in by_gpus.values()]}
    groups = [f"{gpus} GPUs" for gpus in LIMITS_S]
    plot = report.bars("planner", "Time to plan three tiers", groups, series, "seconds", log=True)
    print(f"{path}\n{plot}")
