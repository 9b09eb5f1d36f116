"""`penstock plan`: plan a cascade; see and change what the mesh follows."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from penstock.cli import planning, targets
from penstock.cli.output import console, fail, print_json, tier_counts, told_errors
from penstock.client.sync import Client, PlannerClient
from penstock.client.types import Plan

app = typer.Typer(
    no_args_is_help=True, help="Plan a cascade for a cluster, or see and change the plan that the running mesh follows."
)


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    cluster: Annotated[Path | None, typer.Option("--cluster", help="YAML: GPUs and nodes.")] = None,
    models: Annotated[Path | None, typer.Option("--models", help="YAML: the cascade's tiers and their models.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="CSV: arrival_s, input_tokens, output_tokens; gzip too.")
    ] = None,
    quality: Annotated[
        Path | None,
        typer.Option(
            "--quality", help="CSV: input_tokens, and per tier {tier}_output_tokens and {tier}_judge_score; gzip too."
        ),
    ] = None,
    min_quality: Annotated[
        float | None, typer.Option("--min-quality", help="The least latency at this mean judge score.")
    ] = None,
    max_latency: Annotated[
        float | None, typer.Option("--max-latency", help="The most quality at this p95 of the slowest tier, seconds.")
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", help="largest-tier: p95 of the slowest tier; end-to-end: what a user feels.")
    ] = "largest-tier",
    confidence: Annotated[
        float | None,
        typer.Option("--confidence", help="Promise --min-quality for new requests with this probability, as 0.95."),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="At most so many of the cluster's.", min=1)] = None,
    budget: Annotated[
        str, typer.Option("--budget", help="at-most: as many GPUs as help the slowest tier; exact: all of them.")
    ] = "at-most",
    requests: Annotated[int, typer.Option("--requests", help="Requests to plan for.", min=1)] = 500,
    seed: Annotated[int, typer.Option("--seed", help="Where in the trace, and which prompts.")] = 1,
    lengths: Annotated[str, typer.Option("--lengths", help="quality or trace: whose token counts.")] = "quality",
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests per second; else the trace's.", min=1e-9)
    ] = None,
    dispatch: Annotated[str, typer.Option("--dispatch", help="capacity or round-robin.")] = "capacity",
    out: Annotated[Path, typer.Option("--out", help="The plan file; the plot goes beside it.")] = Path("plan.json"),
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw quality against latency.")] = True,
    json: targets.Json = False,
) -> None:
    """Plan a cascade: GPUs, parallelism and thresholds for a trace and judged prompts. Needs no mesh."""
    if context.invoked_subcommand is not None:
        return
    given = {"--cluster": cluster, "--models": models, "--trace": trace, "--quality": quality}
    if missing := [name for name, value in given.items() if value is None]:
        fail(f"{', '.join(missing)} missing: a plan needs cluster, models, trace and quality", 2)
    assert cluster is not None
    assert models is not None
    assert trace is not None
    assert quality is not None
    planning.plan(
        cluster,
        models,
        trace,
        quality,
        min_quality=min_quality,
        max_latency=max_latency,
        objective=objective,
        confidence=confidence,
        gpus=gpus,
        budget=budget,
        requests=requests,
        seed=seed,
        lengths=lengths,
        rate=rate,
        dispatch=dispatch,
        out=out,
        plot=plot,
        json=json,
    )


@app.command("show")
def show(
    revision: Annotated[int | None, typer.Option("--revision", help="An earlier one.")] = None,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """The plan that holds."""
    where = targets.resolve(target)
    with told_errors(where), PlannerClient(_planner(where)) as planner:
        _print(planner.get_plan(revision), json=json)


@app.command("set")
def set_(
    threshold: Annotated[
        list[str] | None, typer.Option("--threshold", help="TIER=SCORE: its answers stand from this score on.")
    ] = None,
    instances: Annotated[
        list[str] | None,
        typer.Option("--instances", help="TIER=COUNT: workers of the tier; a mesh that `penstock up` runs follows."),
    ] = None,
    scorer: Annotated[str | None, typer.Option("--scorer", help="Who judges.")] = None,
    note: Annotated[str, typer.Option("--note", help="Why.")] = "",
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """Publish the current plan with some values changed. Routers follow at once; no request is dropped."""
    changes = {}
    for option in threshold or []:
        tier, _, value = option.partition("=")
        try:
            changes[tier] = float(value)
        except ValueError:
            fail(f"--threshold {option}: must be TIER=SCORE", 2)
    counts = tier_counts("--instances", instances or [])
    where = targets.resolve(target)
    with told_errors(where), PlannerClient(_planner(where)) as planner:
        plan = planner.get_plan()
        unknown = {*changes, *counts} - {t.name for t in plan.tiers}
        if unknown:
            fail(f"no tier {', '.join(sorted(unknown))}", 2)
        tiers = tuple(
            dataclasses.replace(
                t, threshold=changes.get(t.name, t.threshold), instances=counts.get(t.name, t.instances)
            )
            for t in plan.tiers
        )
        wanted = dataclasses.replace(
            plan, tiers=tiers, scorer=plan.scorer if scorer is None else scorer, source="operator", note=note
        )
        _print(planner.set_plan(wanted, expected_revision=plan.revision), json=json)


def _planner(where: str) -> str:
    """The planner's address, as the router knows it."""
    with Client(where) as client:
        planners = [instance for instance in client.status().instances if instance.role == "planner"]
    if not planners:
        fail("no planner is up")
    return min(planners, key=lambda instance: instance.age_s).address  # one that just died may still be listed


def _print(plan: Plan, *, json: bool) -> None:
    if json:
        print_json(plan)
        return
    table = Table(title=f"plan {plan.revision} ({plan.source}{': ' + plan.note if plan.note else ''})")
    for name in ("tier", "model", "threshold", "instances"):
        table.add_column(name)
    for t in plan.tiers:
        table.add_row(t.name, t.model, "-" if t.threshold is None else f"{t.threshold:g}", str(t.instances))
    console.print(table)
    console.print(f"scorer {plan.scorer or '(the default)'}, judge unavailable: {plan.judge_unavailable}")
