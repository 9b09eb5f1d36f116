"""`penstock plan --cluster ...`: compute a plan without a mesh."""

import dataclasses
import json as json_module
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.cli import options, plan_plots, plan_report, plan_sweep, slo_attainment
from penstock.cli.output import errors, fail, print_json
from penstock.cli.planner_errors import planner_error_handling

if TYPE_CHECKING:
    from planner_service.planning_options import Options

FRONTIER_POINTS, TYPED_FRONTIER_POINTS = 16, 8  # with one type of GPU, with several


def plan(
    cluster: Path,
    models: Path,
    trace: Path,
    quality: Path,
    *,
    min_quality: float | None,
    max_latency: float | None,
    goal: str | None,
    objective: str | None,
    percentile: float,
    max_utilisation: float | None,
    runs: int,
    confidence: float | None,
    gpus: int | None,
    budget: str,
    requests: int | None,
    seed: int,
    lengths: str,
    rate: float | None,
    ignore_cached: bool,
    dispatch: str,
    skip: bool,
    best_answer: bool,
    long_answers: bool,
    early_error: float | None,
    burst_floor: float | None,
    burst_mean: float | None,
    max_tiers: int | None,
    min_tiers: int | None,
    slo: list[str],
    out: Path | None,
    plot: bool,
    sweep: str | None,
    json: bool,
) -> dict[str, Any]:
    """Compute and show a plan, write the plan file and the plot if requested. Returns the content of the plan file.

    sweep: compute and show plans for several rates, qualities or numbers of GPUs instead.
    """
    from planner_service.demand import workload_digest
    from planner_service.files import read_quality, read_site, read_trace
    from planner_service.frontiers import frontiers
    from planner_service.horizon import plan_over_horizon
    from planner_service.plan_cascade import chosen_of, plan_cascade
    from planner_service.plan_file import PlanInputs, plan_json
    from planner_service.planning_options import Budget, Goal, Options
    from planner_service.routing.grid import MOST_TIERS
    from planner_service.simulator import Dispatch
    from planner_service.simulator.felt import Objective
    from planner_service.verdict import next_step, verdict

    if min_quality is None and max_latency is None:
        fail("give --min-quality, --max-latency or both", 2)
    turns = [Dispatch.CAPACITY, Dispatch.ROUND_ROBIN]
    kinds = (("--dispatch", dispatch, turns), ("--objective", objective, Objective), ("--goal", goal, Goal))
    for flag, value, kind in (*kinds, ("--budget", budget, Budget)):
        options.check_choice(flag, value, kind)
    if long_answers and lengths == "trace":
        fail(options.LENGTHS_OF_ANSWERS, 2)
    to_stdout = out == options.STDOUT
    with planner_error_handling(json=json or to_stdout):
        classes = slo_attainment.read_classes(slo)
        site = read_site(cluster, models)
        judged, arrivals = read_quality(quality, site.tiers), read_trace(trace)
        arrivals = arrivals.uncached() if ignore_cached else arrivals
        if objective is None:
            most = len(site.tiers) if max_tiers is None else max_tiers
            simple = confidence is None and budget == Budget.AT_MOST.value and most <= MOST_TIERS
            objective = (Objective.END_TO_END if simple else Objective.LARGEST_TIER).value
        chosen = Options(
            gpus=gpus,
            min_quality=min_quality,
            max_latency_s=max_latency,
            goal=None if goal is None else Goal(goal),
            objective=Objective(objective),
            percentile=percentile,
            confidence=confidence,
            seed=seed,
            dispatch=Dispatch(dispatch),
            budget=Budget(budget),
            max_utilisation=max_utilisation,
            skip=skip,
            best_answer=best_answer,
            long_answers=long_answers,
            early_error=early_error,
            burst_floor=burst_floor,
            burst_mean=burst_mean,
            max_tiers=max_tiers,
            min_tiers=min_tiers,
        )
        if sweep is not None:
            drawn = {"requests": requests, "seed": seed, "lengths": lengths, "runs": runs}
            workload = plan_sweep.Swept(site, arrivals, judged, chosen, rate, drawn)
            return plan_sweep.run(sweep, workload, out=out, plot=plot, json=json)
        began = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=errors, transient=True, disable=json or to_stdout) as progress:
            bar = progress.add_task("planning", total=None)
            planned, demand = plan_over_horizon(
                lambda demand, others: plan_cascade(
                    site,
                    demand,
                    chosen,
                    runs=others,
                    on_evaluation=lambda n: progress.update(bar, description=f"planning: {n} routings tried"),
                ),
                site,
                arrivals,
                judged,
                requests=requests,
                seed=seed,
                lengths=lengths,
                rate=rate,
                runs=runs,
            )
            took_s = time.monotonic() - began
            candidates, offered = site, demand
            site, demand = chosen_of(planned, site, demand)
            digest = workload_digest(demand)
            demand = demand.under(planned.rules)
            unguaranteed = planned
            if planned.promise is not None:
                progress.update(bar, description="planning without the guarantee, for comparison")
                plain = dataclasses.replace(chosen, confidence=None, burst_floor=None, burst_mean=None)
                plain = dataclasses.replace(plain, skip=False, long_answers=False, best_answer=False)
                unguaranteed = plan_cascade(site, demand, plain, max_tiers=None, min_tiers=None)
            progress.update(bar, description="planning for more quality, for comparison")
            step = None
            if planned.promise is None:
                step = next_step(planned, offered, chosen, partial(plan_cascade, candidates))
            inputs = PlanInputs(
                cluster=str(cluster.resolve()),
                models=str(models.resolve()),
                quality=str(quality.resolve()),
                trace=str(trace.resolve()),
                gpus=gpus,
                requests=len(demand.arrival_s),
                seed=seed,
                lengths=lengths,
                rate=rate,
                max_utilisation=max_utilisation,
                runs=runs,
                max_tiers=max_tiers,
                min_tiers=min_tiers,
                ignore_cached=ignore_cached,
            )
            figures = plan_json(planned, inputs, took_s, _target(chosen), digest, site)
            figures["verdict"] = verdict(site, planned, step)
            figures["next_step"] = None if step is None else dataclasses.asdict(step)
            attainments = slo_attainment.simulate(
                site, demand, planned.thresholds, [tier.strategy for tier in planned.tiers], classes, seed
            )
            if attainments:
                figures["slo"] = slo_attainment.classes_json(classes, attainments)
            written = []
            if out is not None and not to_stdout:
                out.write_text(json_module.dumps(figures, indent=1) + "\n")
                written.append(out)
            if plot and out is not None:
                progress.update(bar, description="drawing the frontier")
                points = FRONTIER_POINTS if len(site.types) == 1 else TYPED_FRONTIER_POINTS
                best = frontiers(site, demand, planned, gpus, points, max_utilisation)
                written += plan_plots.plot_frontiers(*best, planned, out)
                written += plan_plots.plot_nodes(site, planned, out)
    if json or to_stdout:
        print_json(figures)
    else:
        plan_report.show(planned, unguaranteed, site, demand, took_s, written, step)
        slo_attainment.show(attainments)
    return figures


def _target(options: "Options") -> str:
    """The targets in words, as `quality >= 85, p95 end-to-end latency <= 2`."""
    targets = []
    if options.min_quality is not None:
        targets.append(f"quality >= {options.min_quality:g}")
    if options.max_latency_s is not None:
        targets.append(f"{options.latency_words} <= {options.max_latency_s:g}")
    return ", ".join(targets)
