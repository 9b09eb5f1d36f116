"""`penstock plan`: compute a plan for a cascade; show and change the plan of a mesh."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import (
    options,
    plan_capacity,
    plan_diff,
    plan_publishing,
    plan_revisions,
    planning,
    rendering,
    targets,
)
from penstock.cli.extras import needs_extra
from penstock.cli.output import cli_error_handling, fail, print_written
from penstock.cli.planner_errors import planner_error_handling

MAX_LATENCY_S = 86_400.0
MAX_CONFIDENCE = 0.999999
MAX_PERCENTILE = 99.99
MAX_EARLY_ERROR = 0.5

app = typer.Typer(
    no_args_is_help=True, help="Compute a plan for a cluster, or show and change the current plan of a mesh."
)


@app.callback(invoke_without_command=True)
@needs_extra("plan", "planner")
def plan(
    context: typer.Context,
    cluster: Annotated[Path | None, typer.Option("--cluster", help="YAML file: GPUs and nodes.")] = None,
    models: Annotated[Path | None, typer.Option("--models", help="YAML file: the tiers and their models.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help=options.TRACE_COLUMNS)] = None,
    quality: Annotated[
        Path | None,
        typer.Option(
            "--quality",
            help="CSV file, may be gzipped: input_tokens, and {tier}_output_tokens, {tier}_judge_score of each tier; "
            "{tier}_quality where that is known apart from the score.",
        ),
    ] = None,
    min_quality: Annotated[
        float | None,
        options.number("--min-quality", help="Mean quality of the answers that stand.", least=0, most=100),
    ] = None,
    max_latency: Annotated[
        float | None,
        options.number(
            "--max-latency",
            help="The latency that --objective names, at --percentile, seconds.",
            least=0,
            most=MAX_LATENCY_S,
            above=True,
        ),
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            "--goal", help="latency, quality, cost or rate; else cost where both targets are given, or what has none."
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            help="Which latency: end-to-end; first-token, to the first token that a user sees; pace, seconds per output "
            "token; largest-tier, of the slowest tier. Else end-to-end, with up to three tiers and without --confidence and "
            "--budget exact.",
        ),
    ] = None,
    percentile: Annotated[
        float,
        options.number("--percentile", help="Percentile of that latency, such as 99.", least=50, most=MAX_PERCENTILE),
    ] = 95.0,
    max_utilisation: Annotated[
        float,
        options.number(
            "--max-utilisation",
            help="Of what each tier sustains, the share that the rate may take.",
            least=0,
            most=1,
            above=True,
        ),
    ] = 0.75,
    allow_overload: Annotated[
        bool, typer.Option("--allow-overload", help="Plan although no plan sustains the rate: for a burst.")
    ] = False,
    runs: Annotated[
        int,
        options.number("--runs", help="Other stretches of the trace that the plan is run on.", least=0, most=100),
    ] = 5,
    confidence: Annotated[
        float | None,
        options.number(
            "--confidence",
            help="Guarantee --min-quality for new requests with this probability, such as 0.95.",
            least=0.5,
            most=MAX_CONFIDENCE,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        options.number(
            "--gpus", help="Number of GPUs to use; default: all of the cluster.", least=1, most=options.MAX_COUNT
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            "--budget", help="at-most: only as many GPUs as reduce the latency of the slowest tier; exact: all of them."
        ),
    ] = "at-most",
    requests: Annotated[
        int | None,
        options.number(
            "--requests",
            help="Requests to plan for; else as many as come in 20 latencies, from 500 to 6000, or all that the trace has.",
            least=1,
            most=options.MAX_COUNT,
        ),
    ] = None,
    seed: options.SelectionSeed = 1,
    lengths: options.Lengths = "quality",
    rate: options.TraceRate = None,
    ignore_cached: options.IgnoreCached = False,
    dispatch: options.Dispatch = "capacity",
    skip: Annotated[
        bool,
        typer.Option(
            "--skip/--no-skip",
            help="Also choose below which predicted score a tier is passed over; --quality then needs predicted scores.",
        ),
    ] = False,
    best_answer: Annotated[
        bool,
        typer.Option(
            "--best-answer/--no-best-answer",
            help="Also choose whether a request's reply is the best of its answers, instead of the last.",
        ),
    ] = False,
    long_answers: Annotated[
        bool,
        typer.Option(
            "--long-answers/--no-long-answers",
            help="Also choose from which length and score on long answers are accepted.",
        ),
    ] = False,
    early_error: Annotated[
        float | None,
        options.number(
            "--early-error",
            help="Also fit early checks, which may reject this share of the answers that would stand, such as 0.01; "
            "--quality then needs scores of unfinished answers.",
            least=0,
            most=MAX_EARLY_ERROR,
            above=True,
        ),
    ] = None,
    burst_floor: Annotated[
        float | None,
        options.number(
            "--burst-floor",
            help="Also compute a ladder of thresholds that give way under a burst, down to this mean judge score.",
            least=0,
            most=100,
        ),
    ] = None,
    burst_mean: Annotated[
        float | None,
        options.number(
            "--burst-mean",
            help="Mean judge score that routers hold over a window while thresholds give way; else --min-quality.",
            least=0,
            most=100,
        ),
    ] = None,
    max_tiers: Annotated[
        int | None,
        options.number(
            "--max-tiers",
            help="The tiers of --models are candidates: choose the best cascade of at most so many, in their order.",
            least=1,
            most=options.MAX_COUNT,
        ),
    ] = None,
    min_tiers: Annotated[
        int | None,
        options.number(
            "--min-tiers", help="With --max-tiers: of at least so many; default: 1.", least=1, most=options.MAX_COUNT
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        options.slo_classes("--slo", help="A class of requests with SLOs: their attainment is reported. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None, options.new_file_or_stdout("--out", help="Write the plan to this file; - for standard output.")
    ] = None,
    plot: Annotated[
        bool,
        typer.Option(
            "--plot/--no-plot",
            help="Plot latency and cost against quality, and the tiers on the nodes: PNG and SVG next to the file of --out.",
        ),
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            help="rate, quality or gpus: a plan for each of several values, as a table. With values: rate=5,10,20.",
        ),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Publish the plan: the mesh adopts its thresholds and instance counts.")
    ] = False,
    render: Annotated[
        str | None,
        typer.Option(
            "--render",
            help="compose or kubernetes: write manifests with the flags of SGLang next to the file of --out.",
        ),
    ] = None,
    force: plan_publishing.ForceOption = False,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Compute a plan for a cascade: GPUs, parallelism and thresholds for a trace and judged prompts. Needs no mesh."""
    if context.invoked_subcommand is not None:
        return
    inputs = {"--cluster": cluster, "--models": models, "--trace": trace, "--quality": quality}
    if missing := [name for name, value in inputs.items() if value is None]:
        fail(f"{', '.join(missing)} missing: a plan needs cluster, models, trace and quality", 2)
    assert cluster is not None
    assert models is not None
    assert trace is not None
    assert quality is not None
    for name, requested in (("--plot", plot), ("--render", render is not None)):
        if requested:
            options.require_out(name, out)
    if sweep is not None and (apply or render is not None or slo or burst_floor is not None):
        fail("--sweep computes several plans: it goes without --apply, --render, --slo and --burst-floor", 2)
    if render is not None:
        rendering.check(render)
    if apply:  # check first whether the mesh would refuse the plan
        with planner_error_handling():
            tiers = plan_publishing.planned_tiers(cluster, models)
        listeners = targets.resolve_admin(admin)
        with cli_error_handling(listeners), targets.planner_client(listeners) as planner:
            current = planner.get_plan()
        if max_tiers is not None:  # those of the mesh may be chosen
            served = {tier.name for tier in current.tiers}
            tiers = [tier for tier in tiers if tier.name in served]
        plan_publishing.refuse_other_models(current, tiers, force=force)
    figures = planning.plan(
        cluster,
        models,
        trace,
        quality,
        min_quality=min_quality,
        max_latency=max_latency,
        goal=goal,
        objective=objective,
        percentile=percentile,
        max_utilisation=None if allow_overload else max_utilisation,
        runs=runs,
        confidence=confidence,
        gpus=gpus,
        budget=budget,
        requests=requests,
        seed=seed,
        lengths=lengths,
        rate=rate,
        ignore_cached=ignore_cached,
        dispatch=dispatch,
        skip=skip,
        best_answer=best_answer,
        long_answers=long_answers,
        early_error=early_error,
        burst_floor=burst_floor,
        burst_mean=burst_mean,
        max_tiers=max_tiers,
        min_tiers=min_tiers,
        slo=slo or [],
        out=out,
        plot=plot,
        sweep=sweep,
        json=json,
    )
    if render is not None:
        assert out is not None
        written = rendering.render(out, render)
        if not json:
            print_written(*written)
    if apply:
        plan_publishing.publish(figures, "", admin, force=force, json=False, quiet=json)


@needs_extra("plan render", "planner")
def render_(
    file: Annotated[Path, typer.Argument(help="A plan file of `penstock plan`.")],
    form: Annotated[str, typer.Option("--to", help="compose or kubernetes.")],
) -> None:
    """Write the manifests of a plan: SGLang servers with their flags, workers and the other services."""
    print_written(*rendering.render(file, form))


app.command("apply")(plan_publishing.apply)
app.command("diff")(plan_diff.diff)
app.command("capacity")(plan_capacity.capacity)
app.command("show")(plan_revisions.show)
app.command("set")(plan_revisions.set_)
app.command("render")(render_)
app.command("history")(plan_revisions.history)
app.command("rollback")(plan_revisions.rollback)
