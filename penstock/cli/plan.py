"""`penstock plan`: plan a cascade; see and change what the mesh follows."""

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from penstock.cli import options, plan_changes, planning, rendering, targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import (
    cli_error_handling,
    console,
    errors,
    fail,
    print_json,
    print_written,
    seconds,
    tier_counts,
)
from penstock.cli.plan_changes import WantedTier
from penstock.client.sync import PlannerClient
from penstock.client.types import Plan, Prediction, TierPlan

MAX_LATENCY_S = 86_400.0
MAX_CONFIDENCE = 0.999999

ForceOption = Annotated[bool, typer.Option("--force", help="Publish it although it is for other models.")]

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
        float | None,
        options.number("--min-quality", help="The least latency at this mean judge score.", least=0, most=100),
    ] = None,
    max_latency: Annotated[
        float | None,
        options.number(
            "--max-latency",
            help="The most quality at this p95 of the slowest tier, seconds.",
            least=0,
            most=MAX_LATENCY_S,
            above=True,
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", help="largest-tier: p95 of the slowest tier; end-to-end: what a user feels.")
    ] = "largest-tier",
    confidence: Annotated[
        float | None,
        options.number(
            "--confidence",
            help="Promise --min-quality for new requests with this probability, as 0.95.",
            least=0.5,
            most=MAX_CONFIDENCE,
        ),
    ] = None,
    gpus: Annotated[
        int | None, options.number("--gpus", help="At most so many of the cluster's.", least=1, most=options.MAX_COUNT)
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", help="at-most: as many GPUs as help the slowest tier; exact: all of them.")
    ] = "at-most",
    requests: Annotated[
        int | None,
        options.number(
            "--requests",
            help="Requests to plan for; else 500, or all that the trace has.",
            least=1,
            most=options.MAX_COUNT,
        ),
    ] = None,
    seed: Annotated[int, options.seed("--seed", help="Where in the trace, and which prompts.")] = 1,
    lengths: Annotated[str, typer.Option("--lengths", help="quality or trace: whose token counts.")] = "quality",
    rate: Annotated[
        float | None,
        options.number(
            "--rate", help="Requests per second; else the trace's.", least=0, most=options.MAX_RATE_PER_S, above=True
        ),
    ] = None,
    dispatch: Annotated[str, typer.Option("--dispatch", help="capacity or round-robin.")] = "capacity",
    out: Annotated[Path | None, options.new_file("--out", help="Write the plan to this file.")] = None,
    plot: Annotated[
        bool,
        typer.Option("--plot/--no-plot", help="Draw quality against latency: PNG and SVG beside the file of --out."),
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Publish it: the running mesh follows its thresholds and instance counts.")
    ] = False,
    render: Annotated[
        str | None,
        typer.Option(
            "--render", help="compose or kubernetes: write manifests with SGLang's flags beside the file of --out."
        ),
    ] = None,
    force: ForceOption = False,
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
    for name, asked in (("--plot", plot), ("--render", render is not None)):
        if asked:
            options.require_out(name, out)
    if render is not None:
        rendering.check(render)
    if apply:  # what the mesh would refuse is not solved first
        with planning.told_faults():
            wanted = planning.planned_tiers(cluster, models)
        where = targets.resolve(target)
        with cli_error_handling(where), PlannerClient(targets.planner(where)) as planner:
            _refuse_other_models(planner.get_plan(), wanted, force=force)
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
        assert out is not None
        _told(rendering.render(out, render), quiet=json)
    if apply:
        _apply(figures, "", target, force=force, json=False, quiet=json)


@app.command("apply")
@needs_extra("plan apply", "planner")
def apply_(
    file: Annotated[Path, typer.Argument(help="A plan file, as `penstock plan` writes it.")],
    note: Annotated[str, typer.Option("--note", help="Why.")] = "",
    force: ForceOption = False,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """Publish a plan file: the running mesh follows its thresholds and instance counts.

    A plan that was made for other models than the mesh serves is refused.
    """
    from planner_service.plan_file import read_figures

    with planning.told_faults():
        figures = read_figures(file)
    _apply(figures, note, target, force=force, json=json, quiet=False)


@app.command("show")
def show(
    revision: Annotated[
        int | None, options.number("--revision", help="An earlier one.", least=1, most=options.MAX_SEED)
    ] = None,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """The plan that holds."""
    where = targets.resolve(target)
    with cli_error_handling(where), PlannerClient(targets.planner(where)) as planner:
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
    if not threshold and not instances and scorer is None:
        fail("nothing to change: give --threshold, --instances or --scorer", 2)
    changes = {}
    for option in threshold or []:
        tier, _, value = option.partition("=")
        try:
            changes[tier] = float(value)
        except ValueError:
            fail(f"--threshold {option}: must be TIER=SCORE", 2)
        if not 0 <= changes[tier] <= 100:
            fail(f"--threshold {option}: a score is from 0 to 100", 2)
    counts = tier_counts("--instances", instances or [])
    where = targets.resolve(target)
    with cli_error_handling(where), PlannerClient(targets.planner(where)) as planner:
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
    limit: Annotated[int, options.number("--limit", "-n", help="Revisions.", least=1, most=1000)] = 20,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """The last plans: who made them and why, and what they were expected to reach."""
    where = targets.resolve(target)
    with cli_error_handling(where), PlannerClient(targets.planner(where)) as planner:
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


@app.command("rollback")
def rollback(
    revision: Annotated[
        int | None,
        typer.Argument(
            help="The plan to go back to; else the one before the plan that holds.",
            callback=options.within(1, options.MAX_SEED),
        ),
    ] = None,
    note: Annotated[str, typer.Option("--note", help="Why.")] = "",
    force: ForceOption = False,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """Publish an earlier plan again under a new revision: its thresholds, instances, scorer and policy."""
    where = targets.resolve(target)
    with cli_error_handling(where), PlannerClient(targets.planner(where)) as planner:
        current = planner.get_plan()
        if revision is None and current.source == "rollback":
            fail(
                f"plan {current.revision} is a rollback itself ({current.note}): say which plan to go back to; "
                "`penstock plan history` lists them",
                2,
            )
        wanted = current.revision - 1 if revision is None else revision
        if wanted < 1:
            fail(f"plan {current.revision} is the first: there is none before it", 2)
        if wanted == current.revision:
            fail(f"plan {wanted} is the one that holds", 2)
        earlier = planner.get_plan(wanted)
        tiers = [WantedTier(t.name, t.model, t.threshold, t.instances) for t in earlier.tiers]
        _refuse_other_models(current, tiers, force=force)
        if not json:
            plan_changes.show(console, current, tiers)
        made = dataclasses.replace(earlier, source="rollback", note=note or f"to plan {wanted}")
        _print(planner.set_plan(made, expected_revision=current.revision), json=json)


def _apply(figures: dict[str, Any], note: str, target: str | None, *, force: bool, json: bool, quiet: bool) -> None:
    """Publish what a plan file says, over the plan that holds: its scorer and its policy stay."""
    from planner_service.plan_cascade import mesh_tiers

    where = targets.resolve(target)
    with cli_error_handling(where), PlannerClient(targets.planner(where)) as planner:
        current = planner.get_plan()
        instances = [sum(group["count"] for group in tier["replicas"]) for tier in figures["tiers"]]
        said = mesh_tiers(figures["thresholds"], instances)
        wanted = [
            WantedTier(tier["name"], tier["model"], threshold, count, tier["gpus"])
            for tier, (threshold, count) in zip(figures["tiers"], said, strict=True)
        ]
        _refuse_other_models(current, wanted, force=force)
        if not (quiet or json):
            plan_changes.show(console, current, wanted)
        prediction = Prediction(
            figures["objective"],
            figures.get("target", ""),
            figures.get("workload_digest", ""),
            figures["quality"],
            figures["latency_p95_s"],
            figures["end_to_end_p95_s"],
        )
        tiers = zip(current.tiers, said, strict=True)
        made = dataclasses.replace(
            current,
            tiers=tuple(_changed(t, threshold, count) for t, (threshold, count) in tiers),
            source="planned",
            note=note,
            prediction=prediction,
        )
        published = planner.set_plan(made, expected_revision=current.revision)
    if not quiet:
        _print(published, json=json)


def _refuse_other_models(current: Plan, wanted: list[WantedTier], *, force: bool) -> None:
    """Show the difference and end the command where a plan is for other tiers or, unless forced, for other models."""
    if reason := plan_changes.other_tiers(current, wanted):
        plan_changes.show(errors, current, wanted)
        fail(reason, 2)
    if (reason := plan_changes.other_models(current, wanted)) and not force:
        plan_changes.show(errors, current, wanted)
        fail(f"the plan is for other models: {reason}; --force publishes it all the same", 2)


def _told(written: list[Path], *, quiet: bool) -> None:
    if not quiet:
        print_written(*written)


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
