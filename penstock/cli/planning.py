"""`penstock plan --cluster ...` and `penstock simulate`: run the planner without a mesh."""

import dataclasses
import enum
import json as json_module
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.cli import options, plan_plots, plan_report, plan_sweep, targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import console, errors, fail, print_json, seconds
from penstock.cli.plan_changes import PlannedTier

if TYPE_CHECKING:
    from planner_service.deployment.search import Strategy
    from planner_service.planning_options import Options
    from planner_service.site import Demand, Site
    from planner_service.slo_classes import ClassAttainment, WorkloadClass

LENGTHS_OF_ANSWERS = "--lengths trace goes without --long-answers: the length of each answer counts"
FRONTIER_POINTS, TYPED_FRONTIER_POINTS = 16, 8  # with one type of GPU, with several
DEFAULT_REQUESTS, DEFAULT_REPLAY = 500, 2000


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
    dispatch: str,
    skip: bool,
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
        _check_choice(flag, value, kind)
    if long_answers and lengths == "trace":
        fail(LENGTHS_OF_ANSWERS, 2)
    to_stdout = out == options.STDOUT
    with planner_error_handling(json=json or to_stdout):
        classes = _slo_classes(slo)
        site = read_site(cluster, models)
        judged, arrivals = read_quality(quality, site.tiers), read_trace(trace)
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
                plain = dataclasses.replace(plain, skip=False, long_answers=False)
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
            )
            figures = plan_json(planned, inputs, took_s, _target(chosen), digest, site)
            figures["verdict"] = verdict(site, planned, step)
            figures["next_step"] = None if step is None else dataclasses.asdict(step)
            attainments = _attainments(
                site, demand, planned.thresholds, [tier.strategy for tier in planned.tiers], classes, seed
            )
            if attainments:
                figures["slo"] = _slo_json(classes, attainments)
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
        _show_attainments(attainments)
    return figures


def _slo_classes(texts: list[str]) -> "list[WorkloadClass]":
    """The classes of --slo, checked; none without the option."""
    from planner_service.slo_classes import WorkloadClass, check_classes

    classes = [WorkloadClass(*fields) for fields in options.parse_slo_classes("--slo", texts)]
    if classes:
        check_classes(classes)
    return classes


def _attainments(
    site: "Site",
    demand: "Demand",
    thresholds: "Sequence[float]",
    strategies: "Sequence[Strategy]",
    classes: "list[WorkloadClass]",
    seed: int,
) -> "list[ClassAttainment]":
    """What each class receives of the deployment; none without classes."""
    if not classes:
        return []
    from planner_service.slo_simulation import simulate_slos

    return simulate_slos(site, demand, thresholds, strategies, classes, seed)


def _slo_json(classes: "Sequence[WorkloadClass]", attainments: "Sequence[ClassAttainment]") -> list[dict[str, Any]]:
    """Times are null for a class without an SLO."""
    return [
        {
            "name": one.name,
            "ttft_s": None if one.best_effort else one.ttft_s,
            "tpot_s": None if one.best_effort else one.tpot_s,
            "share": one.share,
            "requests": result.requests,
            "admitted": None if one.best_effort else result.admitted,
            "attainment": None if one.best_effort else result.attained,
        }
        for one, result in zip(classes, attainments, strict=True)
    ]


def _show_attainments(attainments: "Sequence[ClassAttainment]") -> None:
    if not attainments:
        return
    table = Table(title="SLOs, with the SLO batch policy; reply lengths known")
    for column in ("class", "requests", "admitted", "attainment"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for one in attainments:
        table.add_row(one.name, str(one.requests), f"{one.admitted:.1%}", f"{one.attained:.1%}")
    console.print(table)


def _target(options: "Options") -> str:
    """The targets in words, as `quality >= 85, p95 end-to-end latency <= 2`."""
    targets = []
    if options.min_quality is not None:
        targets.append(f"quality >= {options.min_quality:g}")
    if options.max_latency_s is not None:
        targets.append(f"{options.latency_words} <= {options.max_latency_s:g}")
    return ", ".join(targets)


def _check_choice(flag: str, value: str | None, choices: Iterable[enum.Enum]) -> None:
    """End the command if the value of an option is none of the choices."""
    if value is not None and value not in (names := [choice.value for choice in choices]):
        fail(f"{flag} must be {' or '.join(names)}, not {value}", 2)


@needs_extra("simulate", "planner")
def simulate(
    plan: Annotated[Path, typer.Option("--plan", help="A plan file of `penstock plan`.")],
    trace: Annotated[
        Path, typer.Option("--trace", help="CSV file, may be gzipped: arrival_s, input_tokens, output_tokens.")
    ],
    requests: options.ReplayedRequests = None,
    seed: options.SelectionSeed = 1,
    lengths: options.Lengths = "quality",
    rate: options.TraceRate = None,
    dispatch: Annotated[
        str | None,
        typer.Option(
            "--dispatch",
            help="How requests are distributed over replicas: capacity, round-robin, or pending-work, as routers do. "
            "Default: as planned. The attainment of --slo has its own placement.",
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        options.slo_classes("--slo", help="A class of requests with SLOs: their attainment is reported. Repeatable."),
    ] = None,
    burst_window: Annotated[
        float,
        options.number(
            "--burst-window",
            help="Seconds over which the mean quality of a burst ladder holds, as router.burst_window_s.",
            least=10,
            most=86_400,
        ),
    ] = 600.0,
    json: targets.Json = False,
) -> None:
    """Replay a trace under a plan in virtual time, with the batch scheduler of the workers.

    Where the plan has a burst ladder, thresholds give way as routers let them.
    """
    from planner_service.burst_simulation import simulate_bursts
    from planner_service.cascade_plan import Felt
    from planner_service.cascade_simulation import run_cascade
    from planner_service.plan_file import felt_json, read_plan, read_planned_site, report_json, strategies_of
    from planner_service.simulator import Dispatch

    _check_choice("--dispatch", dispatch, Dispatch)
    with planner_error_handling():
        classes = _slo_classes(slo or [])
        planned = read_plan(plan)
        if any(planned.long_answers) and lengths == "trace":
            fail(LENGTHS_OF_ANSWERS, 2)
        site = read_planned_site(planned)
        files = (trace, Path(planned.inputs.quality))
        demand = _read_demand(site, *files, requests or DEFAULT_REPLAY, seed, lengths, rate, requests is None)
        demand = demand.under(planned.rules)
        how = planned.dispatch if dispatch is None else Dispatch(dispatch)
        strategies = strategies_of(planned.shapes, site)
        bursts: dict[str, Any] | None = None
        if planned.burst is None:
            cascade = run_cascade(site, demand, planned.thresholds, strategies, how)
        else:
            run = simulate_bursts(site, demand, planned.burst, strategies, how, window_s=burst_window, seed=seed)
            cascade = run.cascade
            bursts = {
                "steps": [int((run.steps == i).sum()) for i in range(len(planned.burst.steps))],
                "changes": run.changes,
                "quality": float(run.scores.mean()),
            }
        attainments = _attainments(site, demand, planned.thresholds, strategies, classes, seed)
    felt, reports = Felt.of(cascade), cascade.reports
    spread = felt_json(felt)
    figures = {
        "requests": len(cascade.total_s),
        "end_to_end_s": spread["end_to_end"],
        "user_latency_s": spread,
        "tiers": [{"name": name, **report_json(report)} for name, report in zip(site.tiers, reports, strict=True)],
    }
    if attainments:
        figures["slo"] = _slo_json(classes, attainments)
    if bursts is not None:
        figures["burst"] = bursts
    if json:
        print_json(figures)
        return
    table = Table(
        title=f"{len(cascade.total_s)} requests, end to end p50 {seconds(felt.end_to_end.p50)}, "
        f"p95 {seconds(felt.end_to_end.p95)}"
    )
    for column in ("tier", "requests", "TTFT p50", "p95", "TPOT p50", "p95", "latency p95", "tokens/s", "busy"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for name, report in zip(site.tiers, reports, strict=True):
        times = (report.ttft.p50, report.ttft.p95, report.tpot.p50, report.tpot.p95, report.latency.p95)
        table.add_row(
            name,
            str(report.requests),
            *map(seconds, times),
            f"{report.output_tokens_per_s:,.0f}",
            f"{report.utilisation:.0%}",
        )
    console.print(table)
    console.print(plan_report.felt_line(felt), highlight=False, soft_wrap=True)
    if bursts is not None:
        shares = ", ".join(f"{i}: {count}" for i, count in enumerate(bursts["steps"]))
        console.print(
            f"burst ladder, requests by step: {shares}; {bursts['changes']} changes, quality {bursts['quality']:.2f}",
            highlight=False,
            soft_wrap=True,
        )
    _show_attainments(attainments)


def capacity(
    cluster: Path,
    models: Path,
    trace: Path,
    tier: str | None,
    slo: list[str],
    attainment: float,
    requests: int | None,
    rate: float | None,
    seed: int,
    json: bool,
) -> None:
    """Compute and show the fewest GPUs that keep the SLOs of a trace on one tier."""
    from planner_service.demand import stretch_of
    from planner_service.files import read_site, read_trace
    from planner_service.plan_file import group_json
    from planner_service.slo_simulation import fewest_gpus

    with planner_error_handling():
        classes = _slo_classes(slo)
        site = read_site(cluster, models)
        name = site.tiers[-1] if tier is None else tier
        if name not in site.tiers:
            fail(f"--tier: no tier '{name}' in {models}; there are {', '.join(site.tiers)}", 2)
        arrivals = read_trace(trace)
        count = min(DEFAULT_REPLAY, len(arrivals)) if requests is None else requests
        work = stretch_of(arrivals, count, seed, rate)
        result = fewest_gpus(site, site.tiers.index(name), work, classes, attainment, seed)
    figures = {
        "tier": name,
        "gpus": result.gpus,
        "replicas": [group_json(result.replica.shape, result.replicas)],
        "rate_per_s": work.rate_per_s,
        "target_attainment": attainment,
        "attainment": result.attainment,
        "capacity_per_s": result.capacity_per_s,
        "capacity_per_gpu_s": result.capacity_per_s / result.gpus,
        "requests": len(work),
        "seed": seed,
        "slo": _slo_json(classes, result.classes),
    }
    if json:
        print_json(figures)
        return
    console.print(
        f"{name}: {result.gpus} GPUs ({result.replicas} x {result.replica.shape}) attain {result.attainment:.1%} of the SLOs "
        f"at {work.rate_per_s:.3g} requests/s; {attainment:.0%} up to {result.capacity_per_s:.3g} requests/s, "
        f"{result.capacity_per_s / result.gpus:.3g} per GPU",
        highlight=False,
        soft_wrap=True,
    )
    _show_attainments(result.classes)


@contextmanager
def planner_error_handling(*, json: bool = False) -> Iterator[None]:
    """End the command with one line on an error of the planner: status 2 for bad input, 3 if no plan meets the target.

    json: then also say on standard output which target binds, and the nearest that can be had.
    """
    from planner_service.files import FileError
    from planner_service.routing.solution import Unreachable
    from services.domain.errors import InvalidRequest

    try:
        yield
    except FileError as error:
        fail(str(error), 2)
    except InvalidRequest as error:
        fail(str(error), 2)
    except Unreachable as error:
        if json:
            known = math.isfinite(error.best)
            nearest = {error.binds.value: error.best} if known and error.binds.value != "gpus" else None
            print_json({"feasible": False, "binds": error.binds.value, "nearest": nearest, "reason": str(error)})
        fail(str(error), 3)


def planned_tiers(cluster: Path, models: Path) -> list[PlannedTier]:
    """The tiers of a models file, with their models.

    Raises:
        FileError: A file cannot be used.
    """
    from planner_service.files import read_site

    site = read_site(cluster, models)
    return [PlannedTier(name, model.name) for name, model in zip(site.tiers, site.models, strict=True)]


def _read_demand(
    site: "Site",
    trace: Path,
    quality: Path,
    requests: int,
    seed: int,
    lengths: str,
    rate: float | None,
    fewer: bool,
) -> "Demand":
    """Read what a site is to serve. fewer: use all of a trace that has fewer than `requests`."""
    from planner_service.demand import demand_of
    from planner_service.files import read_quality, read_trace

    judged, arrivals = read_quality(quality, site.tiers), read_trace(trace)
    count = min(requests, len(arrivals)) if fewer else requests
    return demand_of(arrivals, judged, requests=count, seed=seed, lengths=lengths, rate=rate)
