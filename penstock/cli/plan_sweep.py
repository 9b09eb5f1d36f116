"""`penstock plan --sweep`: plans for several rates, qualities or numbers of GPUs, as one table and one plot."""

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from penstock.cli import options, plan_plots, plan_report
from penstock.cli.output import console, fail, print_json, print_line, print_written, seconds, spinner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.planner_service.planning.sweep import SweepPoint
    from penstock.types.planning import PlanningQuestion


def run(text: str, question: "PlanningQuestion", *, out: Path | None, plot: bool, json: bool) -> None:
    """Compute and show the plans of `--sweep TEXT`."""
    from penstock.planner_service.api import plans
    from penstock.planner_service.planning.sweep import Axis

    axis_name, _, listed = text.partition("=")
    if axis_name not in (names := [axis.value for axis in Axis]):
        fail(f"--sweep must be {' or '.join(names)}, or one of them with values as rate=5,10,20, not {text}", 2)
    values = list[float]()
    if listed or "=" in text:
        try:
            values = sorted({float(value) for value in listed.split(",")})
        except ValueError:
            fail(f"--sweep {text}: must be numbers with commas between them", 2)
    to_stdout = out == options.STDOUT
    with spinner(quiet=json or to_stdout) as progress:
        bar = progress.add_task("planning", total=None)
        swept = plans.sweep(
            question,
            Axis(axis_name),
            values,
            lambda number, count: progress.update(bar, description=f"planning: {number} of {count}"),
        )
    points = swept.points
    figures = {
        "sweep": axis_name,
        "goal": swept.options.aim.value,
        "objective": swept.options.objective.value,
        "percentile": swept.options.percentile,
        "points": [_json(point) for point in points],
    }
    written = []
    if out is not None and not to_stdout:
        out.write_text(json_module.dumps(figures, indent=1) + "\n")
        written.append(out)
        if plot:
            written += plan_plots.plot_sweep(axis_name, points, out)
    if json or to_stdout:
        print_json(figures)
        return
    _show(axis_name, points, swept.options.latency_words)
    if written:
        print_written(*written)


def _json(point: "SweepPoint") -> dict[str, Any]:
    plan = point.plan
    if plan is None:
        return {"value": point.value, "feasible": False, "reason": point.reason}
    assert plan.latency is not None
    assert plan.cost is not None
    return {
        "value": point.value,
        "feasible": True,
        "quality": plan.quality,
        "latency_p95_s": plan.latency_p95_s,
        "end_to_end_p95_s": plan.end_to_end_p95_s,
        "latency_s": plan.latency.seconds,
        "cost": {"gpus": plan.cost.gpus, "dollars_per_hour": plan.cost.dollars_per_hour},
        "rate_per_s": plan.rate_per_s,
        "breaks_at_rate": plan.breaks_at_rate,
        "thresholds": [tier.threshold for tier in plan.tiers[:-1]],
        "tiers": [
            {"name": tier.name, "gpus": tier.gpus, "strategy": plan_report.strategy_of(tier)} for tier in plan.tiers
        ],
    }


def _show(axis: str, points: "Sequence[SweepPoint]", latency_words: str) -> None:
    first = next((point.plan for point in points if point.plan is not None), None)
    chosen = first is not None and first.candidates is not None  # then plans may have different tiers
    names = [] if first is None or chosen else [tier.name for tier in first.tiers]
    priced = first is not None and first.cost is not None and first.cost.dollars_per_hour is not None
    notes = [] if first is None else [f"latency: {latency_words}"]
    notes += [f"GPUs by tier: {' + '.join(names)}"] if names else []
    heads = {"rate": "requests/s", "quality": "least quality", "gpus": "GPUs at most"}
    table = Table(title=f"Plans by {heads[axis]}", caption="; ".join(notes) or None)
    columns = [heads[axis], "quality", "latency", "GPUs", *(["dollars/h"] if priced else [])]
    columns += ["by tier", "breaks at", "first"]
    for column in columns:
        table.add_column(column, justify="left" if column == "first" else "right")
    for point in points:
        plan = point.plan
        if plan is None:
            table.add_row(f"{point.value:.4g}", "no plan", *("" for _ in columns[2:]))
            continue
        assert plan.latency is not None
        assert plan.cost is not None
        cost = plan.cost.dollars_per_hour
        dollars = [f"{cost:,.2f}"] if priced and cost is not None else []
        breaks = ["-", ""] if plan.load is None else [f"{plan.load.sustained_per_s:.3g}/s", plan.load.tier]
        counts = " + ".join(f"{tier.name} {tier.gpus}" if chosen else str(tier.gpus) for tier in plan.tiers)
        figures = [f"{plan.quality:.2f}", seconds(plan.latency.seconds), str(plan.cost.gpus), *dollars, counts]
        table.add_row(f"{point.value:.4g}", *figures, *breaks)
    console.print(table)
    for point in points:
        if point.plan is None:
            print_line(f"{point.value:.4g}: {point.reason}")
