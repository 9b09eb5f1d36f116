"""`penstock plan --sweep`: plans for several rates, qualities or numbers of GPUs, as one table and one plot."""

import json as json_module
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.cli import options, plan_plots
from penstock.cli.output import console, errors, fail, print_json, print_written, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner_service.cascade_plan import CascadePlan
    from planner_service.planning_options import Options
    from planner_service.routing.quality import JudgedSample
    from planner_service.simulator import Workload
    from planner_service.site import Site
    from planner_service.sweep import SweepPoint


@dataclass(frozen=True, slots=True)
class Swept:
    """What plans are made for. rate: of the arrivals; None for the trace's. drawn: as for plan_over_horizon."""

    site: "Site"
    arrivals: "Workload"
    judged: "JudgedSample"
    options: "Options"
    rate: float | None
    drawn: dict[str, Any]


def run(text: str, swept: Swept, *, out: Path | None, plot: bool, json: bool) -> dict[str, Any]:
    """Compute and show the plans of `--sweep TEXT`; returns what is written as JSON."""
    from planner_service.horizon import plan_over_horizon
    from planner_service.plan_cascade import plan_cascade
    from planner_service.routing.rules import RoutingRules
    from planner_service.sweep import Axis, sweep, sweep_values

    axis_name, _, listed = text.partition("=")
    if axis_name not in (names := [axis.value for axis in Axis]):
        fail(f"--sweep must be {' or '.join(names)}, or one of them with values as rate=5,10,20, not {text}", 2)
    axis = Axis(axis_name)
    site, judged, chosen_options = swept.site, swept.judged, swept.options
    if listed or "=" in text:
        try:
            values = sorted({float(value) for value in listed.split(",")})
        except ValueError:
            fail(f"--sweep {text}: must be numbers with commas between them", 2)
    else:
        trace_rate = swept.arrivals.rate_per_s
        rate = swept.rate or (trace_rate if 0 < trace_rate < float("inf") else None)
        delivered = judged.under(RoutingRules(best_answer=chosen_options.best_answer))
        values = sweep_values(axis, chosen_options, rate, (judged.worst, delivered.most), site.gpus)
    to_stdout = out == options.STDOUT
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=json or to_stdout) as progress:
        bar = progress.add_task("planning", total=None)
        begun = 0

        def plan_at(chosen: "Options", rate: float | None) -> "CascadePlan":
            nonlocal begun
            begun += 1
            progress.update(bar, description=f"planning: {begun} of {len(values)}")
            return plan_over_horizon(
                lambda demand, others: plan_cascade(site, demand, chosen, runs=others),
                site,
                swept.arrivals,
                judged,
                rate=rate or swept.rate,
                **swept.drawn,
            )[0]

        points = sweep(axis, values, chosen_options, plan_at)
    figures = {
        "sweep": axis.value,
        "goal": chosen_options.aim.value,
        "objective": chosen_options.objective.value,
        "percentile": chosen_options.percentile,
        "points": [_json(point) for point in points],
    }
    written = []
    if out is not None and not to_stdout:
        out.write_text(json_module.dumps(figures, indent=1) + "\n")
        written.append(out)
        if plot:
            written += plan_plots.plot_sweep(axis.value, points, out)
    if json or to_stdout:
        print_json(figures)
    else:
        _show(axis.value, points)
        if written:
            print_written(*written)
    return figures


def _json(point: "SweepPoint") -> dict[str, Any]:
    plan = point.plan
    if plan is None:
        return {"value": point.value, "feasible": False, "reason": point.reason}
    return {
        "value": point.value,
        "feasible": True,
        "quality": plan.quality,
        "latency_p95_s": plan.latency_p95_s,
        "end_to_end_p95_s": plan.end_to_end_p95_s,
        "latency_s": plan.felt_s,
        "cost": {"gpus": plan.gpus, "dollars_per_hour": plan.dollars_per_hour},
        "rate_per_s": plan.rate_per_s,
        "breaks_at_rate": None if plan.load is None else plan.load.sustained_per_s,
        "thresholds": [None if h > 100 else h for h in plan.thresholds],
        "tiers": [{"name": tier.name, "gpus": tier.gpus, "strategy": str(tier.strategy)} for tier in plan.tiers],
    }


def _show(axis: str, points: "Sequence[SweepPoint]") -> None:
    first = next((point.plan for point in points if point.plan is not None), None)
    chosen = first is not None and first.choice is not None  # then plans may have different tiers
    names = [] if first is None or chosen else [tier.name for tier in first.tiers]
    priced = first is not None and first.dollars_per_hour is not None
    notes = [] if first is None else [f"latency: {first.latency_words}"]
    notes += [f"GPUs by tier: {' + '.join(names)}"] if names else []
    heads = {"rate": "requests/s", "quality": "least quality", "gpus": "GPUs at most"}
    table = Table(title=f"Plans by {heads[axis]}", caption="; ".join(notes) or None)
    columns = [
        heads[axis],
        "quality",
        "latency",
        "GPUs",
        *(["dollars/h"] if priced else []),
        "by tier",
        "breaks at",
        "first",
    ]
    for column in columns:
        table.add_column(column, justify="left" if column == "first" else "right")
    for point in points:
        plan = point.plan
        if plan is None:
            table.add_row(f"{point.value:.4g}", "no plan", *("" for _ in columns[2:]))
            continue
        dollars = [f"{plan.dollars_per_hour:,.2f}"] if priced and plan.dollars_per_hour is not None else []
        breaks = ["-", ""] if plan.load is None else [f"{plan.load.sustained_per_s:.3g}/s", plan.load.tier]
        counts = " + ".join(f"{tier.name} {tier.gpus}" if chosen else str(tier.gpus) for tier in plan.tiers)
        figures = [f"{plan.quality:.2f}", seconds(plan.felt_s), str(plan.gpus), *dollars, counts]
        table.add_row(f"{point.value:.4g}", *figures, *breaks)
    console.print(table)
    for point in points:
        if point.plan is None:
            console.print(f"{point.value:.4g}: {point.reason}", highlight=False, soft_wrap=True)
