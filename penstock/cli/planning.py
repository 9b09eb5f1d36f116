"""`penstock plan --cluster ...` and `penstock simulate`: run the planner without a mesh."""

import json as json_module
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.cli import options, targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import console, errors, fail, print_json, print_written, seconds
from penstock.cli.plan_changes import PlannedTier

if TYPE_CHECKING:
    from planner_service.plan_cascade import CascadePlan, Demand, Site

FRONTIER_POINTS = 16
DEFAULT_REQUESTS, DEFAULT_REPLAY = 500, 2000


def plan(
    cluster: Path,
    models: Path,
    trace: Path,
    quality: Path,
    *,
    min_quality: float | None,
    max_latency: float | None,
    objective: str,
    confidence: float | None,
    gpus: int | None,
    budget: str,
    requests: int | None,
    seed: int,
    lengths: str,
    rate: float | None,
    dispatch: str,
    out: Path | None,
    plot: bool,
    json: bool,
) -> dict[str, Any]:
    """Compute and show a plan, write the plan file and the plot if requested. Returns the content of the plan file."""
    from planner_service.demand import workload_digest
    from planner_service.plan_cascade import Budget, Objective, frontier, plan_cascade
    from planner_service.plan_file import PlanInputs, plan_json
    from planner_service.simulator import Dispatch

    if (min_quality is None) == (max_latency is None):
        fail("give either --min-quality or --max-latency", 2)
    names = [d.value for d in Dispatch]
    if dispatch not in names:
        fail(f"--dispatch must be {' or '.join(names)}, not {dispatch}", 2)
    if objective not in (objectives := [o.value for o in Objective]):
        fail(f"--objective must be {' or '.join(objectives)}, not {objective}", 2)
    goal = f"quality >= {min_quality:g}" if min_quality is not None else f"latency <= {max_latency:g}"
    if budget not in (budgets := [b.value for b in Budget]):
        fail(f"--budget must be {' or '.join(budgets)}, not {budget}", 2)
    with planner_error_handling():
        site, demand = _read(
            cluster, models, trace, quality, requests or DEFAULT_REQUESTS, seed, lengths, rate, requests is None
        )
        began = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=errors, transient=True, disable=json) as progress:
            bar = progress.add_task("planning", total=None)
            planned = plan_cascade(
                site,
                demand,
                gpus=gpus,
                min_quality=min_quality,
                max_latency_s=max_latency,
                objective=Objective(objective),
                confidence=confidence,
                seed=seed,
                dispatch=Dispatch(dispatch),
                budget=Budget(budget),
                on_evaluation=lambda n: progress.update(bar, description=f"planning: {n} routings deployed"),
            )
            took_s = time.monotonic() - began
            unguaranteed = planned
            if planned.promise is not None:
                progress.update(bar, description="planning without the guarantee, for comparison")
                unguaranteed = plan_cascade(
                    site, demand, gpus=gpus, min_quality=min_quality, dispatch=Dispatch(dispatch)
                )
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
            )
            figures = plan_json(planned, inputs, took_s, goal, workload_digest(demand))
            written = []
            if out is not None:
                out.write_text(json_module.dumps(figures, indent=1) + "\n")
                written.append(out)
            if plot and out is not None:
                progress.update(bar, description="drawing the frontier")
                written += _plot(frontier(site, demand, planned, gpus, FRONTIER_POINTS), planned, out)
    if json:
        print_json(figures)
    else:
        _show(planned, unguaranteed, site, demand, took_s, written)
    return figures


@needs_extra("simulate", "planner")
def simulate(
    plan: Annotated[Path, typer.Option("--plan", help="A plan file of `penstock plan`.")],
    trace: Annotated[
        Path, typer.Option("--trace", help="CSV file, may be gzipped: arrival_s, input_tokens, output_tokens.")
    ],
    requests: Annotated[
        int | None,
        options.number(
            "--requests",
            help="Number of requests to replay; default: 2000, or all of a shorter trace.",
            least=1,
            most=options.MAX_COUNT,
        ),
    ] = None,
    seed: Annotated[int, options.seed("--seed", help="Seed of the selection of requests and prompts.")] = 1,
    lengths: Annotated[
        str, typer.Option("--lengths", help="Source of the token counts: quality or trace.")
    ] = "quality",
    rate: Annotated[
        float | None,
        options.number(
            "--rate",
            help="Requests per second; default: the rate of the trace.",
            least=0,
            most=options.MAX_RATE_PER_S,
            above=True,
        ),
    ] = None,
    json: targets.Json = False,
) -> None:
    """Replay a trace under a plan in virtual time, with the batch scheduler of the workers."""
    from planner_service.plan_cascade import simulate_cascade
    from planner_service.plan_file import read_plan, report_json, strategies_of
    from planner_service.simulator import Percentiles

    with planner_error_handling():
        planned = read_plan(plan)
        paths = (Path(planned.inputs.cluster), Path(planned.inputs.models), trace, Path(planned.inputs.quality))
        site, demand = _read(*paths, requests or DEFAULT_REPLAY, seed, lengths, rate, requests is None)
        reports, total_s = simulate_cascade(
            site, demand, planned.thresholds, strategies_of(planned.shapes, site), planned.dispatch
        )
    end_to_end = Percentiles.of(total_s)
    figures = {
        "requests": len(total_s),
        "end_to_end_s": {"p50": end_to_end.p50, "p95": end_to_end.p95, "p99": end_to_end.p99, "mean": end_to_end.mean},
        "tiers": [{"name": name, **report_json(report)} for name, report in zip(site.tiers, reports, strict=True)],
    }
    if json:
        print_json(figures)
        return
    table = Table(
        title=f"{len(total_s)} requests, end to end p50 {seconds(end_to_end.p50)}, p95 {seconds(end_to_end.p95)}"
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


@contextmanager
def planner_error_handling() -> Iterator[None]:
    """End the command with one line on an error of the planner: status 2 for bad input, 3 if no plan meets the target."""
    from planner_service.files import FileError
    from planner_service.routing.bilevel import Unreachable
    from services.domain.errors import InvalidRequest

    try:
        yield
    except FileError as error:
        fail(str(error), 2)
    except InvalidRequest as error:
        fail(str(error), 2)
    except Unreachable as error:
        fail(str(error), 3)


def planned_tiers(cluster: Path, models: Path) -> list[PlannedTier]:
    """The tiers of a models file, with their models.

    Raises:
        FileError: A file cannot be used.
    """
    from planner_service.files import read_site

    site = read_site(cluster, models)
    return [PlannedTier(name, model.name) for name, model in zip(site.tiers, site.models, strict=True)]


def _read(
    cluster: Path,
    models: Path,
    trace: Path,
    quality: Path,
    requests: int,
    seed: int,
    lengths: str,
    rate: float | None,
    fewer: bool,
) -> "tuple[Site, Demand]":
    """Read the inputs of a command. fewer: use all of a trace that has fewer than `requests`."""
    from planner_service.demand import demand_of
    from planner_service.files import read_quality, read_site, read_trace

    site = read_site(cluster, models)
    judged, arrivals = read_quality(quality, site.tiers), read_trace(trace)
    count = min(requests, len(arrivals)) if fewer else requests
    return site, demand_of(arrivals, judged, requests=count, seed=seed, lengths=lengths, rate=rate)


def _show(
    plan: "CascadePlan", unguaranteed: "CascadePlan", site: "Site", demand: "Demand", took_s: float, written: list[Path]
) -> None:
    table = Table(title=f"Cascade on up to {site.cluster.gpus} x {site.cluster.gpu.name}")
    for column in ("tier", "GPUs", "strategy", "processes", "answers", "p95", "busy", "threshold"):
        table.add_column(column, justify="left" if column in ("tier", "strategy") else "right")
    for i, tier in enumerate(plan.tiers):
        threshold = "all" if i == len(plan.thresholds) else f"{plan.thresholds[i]:.4g}"
        if not tier.gpus:
            threshold = "not used"
        table.add_row(
            tier.name,
            str(tier.gpus),
            str(tier.strategy),
            f"{tier.share_processed:.0%}",
            f"{tier.share_answered:.0%}",
            seconds(tier.strategy.latency_s) if tier.gpus else "-",
            f"{tier.report.utilisation:.0%}" if tier.gpus else "-",
            threshold,
        )
    console.print(table)
    proof = {
        "enumerated": "optimal: every routing that meets the target was simulated",
        "bounded": "optimal, provided that more requests are never served faster",
        "searched": f"not proved optimal: at most {plan.solution.gap:.0%} above the optimum",
    }[plan.solution.proof.value]
    if plan.gpu_step > 1:
        proof += f", but for {plan.gpu_step - 1} GPUs of a tier"
    lines = [
        ", ".join(f"{tier.name}: {tier.model}" for tier in plan.tiers),
        f"quality {plan.quality:.2f} (first tier alone {demand.judged.worst:.2f}, last alone {demand.judged.best:.2f})",
        f"p95 of the slowest tier {seconds(plan.latency_p95_s)}, end to end {seconds(plan.end_to_end_p95_s)}",
        f"{plan.binds}; dispatch by {plan.dispatch.value}",
        f"{proof}; {plan.solution.evaluations} routings, {plan.simulations} simulations, {took_s:.1f} s",
        *_promise_lines(plan, unguaranteed),
        *(f"tier {name} cannot be used: {reason}" for name, reason in plan.infeasible.items()),
    ]
    console.print("\n".join(lines), highlight=False)
    if written:
        print_written(*written)


def _promise_lines(plan: "CascadePlan", unguaranteed: "CascadePlan") -> list[str]:
    promise = plan.promise
    if promise is None:
        return []
    return [
        f"guaranteed for new requests with confidence {promise.confidence:.0%}: quality {promise.tested_quality:.2f} on "
        f"{promise.tested_prompts} held-out prompts; without the guarantee p95 is {seconds(unguaranteed.latency_p95_s)}"
    ]


def _plot(points: list[tuple[float, float]], plan: "CascadePlan", out: Path) -> list[Path]:
    """Plot quality against latency with this plan marked, as PNG and SVG next to the plan file."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.step([q for q, _ in points], [s for _, s in points], where="pre", color="#1f6f78", label="best plans")
    axes.plot([q for q, _ in points], [s for _, s in points], "o", color="#1f6f78", markersize=4)
    axes.plot(plan.quality, plan.latency_p95_s, "D", color="#e07a3f", markersize=9, label="this plan")
    axes.set_xlabel("quality: mean score of the accepted answers")
    axes.set_ylabel("p95 latency of the slowest tier (s)")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    written = [out.with_suffix(suffix) for suffix in options.PICTURES]
    for path in written:
        figure.savefig(path, dpi=120)
    plt.close(figure)
    return written
