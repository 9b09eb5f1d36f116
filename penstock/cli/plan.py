"""`penstock plan`: plan a cascade; see and change what the mesh follows."""

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from penstock.cli import planning, rendering, targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import console, fail, print_json, seconds, tier_counts, told_errors
from penstock.client.sync import PlannerClient
from penstock.client.types import Plan, Prediction, TierPlan

app = typer.Typer(
    no_args_is_help=True, help="Plan a cascade for a cluster, or see and change the plan that the running mesh follows."
)


@app.callback(invoke_without_command=True)
@needs_extra("plan", "planner")
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
    apply: Annotated[
        bool, typer.Option("--apply", help="Publish it: the running mesh follows its thresholds and instance counts.")
    ] = False,
    render: Annotated[
        str | None, typer.Option("--render", help="compose or kubernetes: write manifests with SGLang's flags.")
    ] = None,
    target: targets.Target = None,
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
    if render is not None:
        rendering.check(render)
    figures = planning.plan(
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
    if render is not None:
        _told(rendering.render(out, render), quiet=json)
    if apply:
        _apply(figures, "", target, json=False, quiet=json)


@app.command("apply")
@needs_extra("plan apply", "planner")
def apply_(
    file: Annotated[Path, typer.Argument(help="A plan file, as `penstock plan` writes it.")],
    note: Annotated[str, typer.Option("--note", help="Why.")] = "",
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """Publish a plan file: the running mesh follows its thresholds and instance counts."""
    from planner_service.plan_file import read_figures

    with planning.told_faults():
        figures = read_figures(file)
    _apply(figures, note, target, json=json, quiet=False)


@app.command("show")
def show(
    revision: Annotated[int | None, typer.Option("--revision", help="An earlier one.")] = None,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """The plan that holds."""
    where = targets.resolve(target)
    with told_errors(where), PlannerClient(targets.planner(where)) as planner:
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
    with told_errors(where), PlannerClient(targets.planner(where)) as planner:
        plan = planner.get_plan()
        unknown = {*changes, *counts} - {t.name for t in plan.tiers}
        if unknown:
            fail(f"no tier {', '.join(sorted(unknown))}", 2)
        tiers = tuple(
            _changed(t, changes.get(t.name, t.threshold), counts.get(t.name, t.instances)) for t in plan.tiers
        )
        wanted = dataclasses.replace(
            plan,
            tiers=tiers,
            scorer=plan.scorer if scorer is None else scorer,
            source="operator",
            note=note,
            prediction=None,
        )
        _print(planner.set_plan(wanted, expected_revision=plan.revision), json=json)


def _changed(tier: TierPlan, threshold: float | None, instances: int) -> TierPlan:
    """Stages hold a number of instances: with another number they no longer do."""
    stages = tier.stages if instances == tier.instances else ()
    return dataclasses.replace(tier, threshold=threshold, instances=instances, stages=stages)


@app.command("render")
@needs_extra("plan render", "planner")
def render_(
    file: Annotated[Path, typer.Argument(help="A plan file, as `penstock plan` writes it.")],
    form: Annotated[str, typer.Option("--to", help="compose or kubernetes.")],
) -> None:
    """Write manifests for a plan: SGLang servers with their flags, workers, and the services around them."""
    _told(rendering.render(file, form), quiet=False)


@app.command("history")
def history(
    limit: Annotated[int, typer.Option("--limit", "-n", help="Revisions.", min=1, max=1000)] = 20,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """The last plans: who made them and why, and what they were expected to reach."""
    where = targets.resolve(target)
    with told_errors(where), PlannerClient(targets.planner(where)) as planner:
        plans = planner.list_plans(limit)
    if json:
        print_json(plans)
        return
    table = Table()
    for name in ("plan", "made", "by", "why", "tiers", "expected"):
        table.add_column(name, justify="right" if name == "plan" else "left")
    for p in plans:
        made = datetime.fromtimestamp(p.created_at).isoformat(" ", "seconds")
        tiers = ", ".join(
            f"{t.name} x{t.instances}" + ("" if t.threshold is None else f" from {t.threshold:g}") for t in p.tiers
        )
        table.add_row(str(p.revision), made, p.source, p.note, tiers, _expected(p.prediction))
    console.print(table)


def _apply(figures: dict[str, Any], note: str, target: str | None, *, json: bool, quiet: bool) -> None:
    """Publish what a plan file says, over the plan that holds: its scorer and its policy stay."""
    from planner_service.plan_cascade import mesh_tiers

    where = targets.resolve(target)
    with told_errors(where), PlannerClient(targets.planner(where)) as planner:
        current = planner.get_plan()
        names = [tier["name"] for tier in figures["tiers"]]
        if names != [t.name for t in current.tiers]:
            fail(
                f"planned are the tiers {', '.join(names)}, the mesh has {', '.join(t.name for t in current.tiers)}", 2
            )
        instances = [sum(group["count"] for group in tier["replicas"]) for tier in figures["tiers"]]
        said = zip(current.tiers, mesh_tiers(figures["thresholds"], instances), strict=True)
        prediction = Prediction(
            figures["objective"],
            figures.get("target", ""),
            figures.get("workload_digest", ""),
            figures["quality"],
            figures["latency_p95_s"],
            figures["end_to_end_p95_s"],
        )
        wanted = dataclasses.replace(
            current,
            tiers=tuple(_changed(t, h, count) for t, (h, count) in said),
            source="planned",
            note=note,
            prediction=prediction,
        )
        made = planner.set_plan(wanted, expected_revision=current.revision)
    if not quiet:
        _print(made, json=json)


def _told(written: list[Path], *, quiet: bool) -> None:
    if not quiet:
        console.print(f"written: {', '.join(map(str, written))}", highlight=False, soft_wrap=True)


def _expected(prediction: Prediction | None) -> str:
    if prediction is None:
        return "-"
    reached = f"quality {prediction.quality:.1f}, p95 {seconds(prediction.latency_p95_s)}"
    return f"{reached}, end to end {seconds(prediction.end_to_end_p95_s)} (wanted: {prediction.target})"


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
    if plan.prediction is not None:
        console.print(f"expected: {_expected(plan.prediction)}; workload {plan.prediction.workload_digest}")
    console.print(f"scorer {plan.scorer or '(the default)'}, judge unavailable: {plan.judge_unavailable}")
