"""`penstock plan`: compute a plan for a cascade; show and change the plan of a mesh."""

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import (
    new_question,
    options,
    plan_capacity,
    plan_plots,
    plan_publishing,
    plan_report,
    plan_revisions,
    plan_sweep,
    slo_attainment,
    targets,
)
from penstock.cli.mesh_plan import PlannedTier
from penstock.cli.output import fail, needs_extra, planner_error_handling, print_json, print_written, spinner

if TYPE_CHECKING:
    from penstock.planner_service.codecs.plan_file import PlanFile
    from penstock.question_files.questions import QuestionFile, QuestionSource

app = typer.Typer(
    no_args_is_help=True, help="Compute a plan for a cluster, or show and change the current plan of a mesh."
)


@app.callback(invoke_without_command=True)
@needs_extra("plan", "planner")
def plan(
    context: typer.Context,
    question: Annotated[
        Path | None,
        typer.Option(help="YAML file: what is planned for; `penstock plan new` writes one. Options override it."),
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="YAML file: GPUs and nodes.")] = None,
    models: Annotated[Path | None, typer.Option(help="YAML file: the tiers and their models.")] = None,
    trace: Annotated[Path | None, typer.Option(help=options.TRACE_COLUMNS)] = None,
    quality: Annotated[
        Path | None,
        typer.Option(
            help="CSV file, may be gzipped: input_tokens, and {tier}_output_tokens, {tier}_judge_score of each tier; "
            "{tier}_quality where that is known apart from the score."
        ),
    ] = None,
    min_quality: Annotated[
        float | None, options.of_question("min_quality", "Mean quality of the answers, 0 to 100.")
    ] = None,
    max_latency: Annotated[
        float | None, options.of_question("max_latency_s", "In seconds: p95 end to end, or as the question has it.")
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            help="latency, quality, cost or rate; default: cost with --min-quality, quality without. The cheapest plan keeps "
            "1.2 times the latency of the largest model alone, if there is no --max-latency."
        ),
    ] = None,
    rate: Annotated[
        float | None, options.of_question("rate", "Requests per second; default: the rate of the trace.")
    ] = None,
    max_utilisation: Annotated[
        float | None,
        options.of_question("max_utilisation", "Share of what a tier sustains that the rate may take; default: 0.75."),
    ] = None,
    gpus: Annotated[
        int | None, options.of_question("gpus", "Number of GPUs to use at most; default: all of the cluster.")
    ] = None,
    seed: Annotated[
        int | None, options.of_question("seed", "Seed of the selection of requests and prompts; default: 1.")
    ] = None,
    slo: Annotated[
        list[str] | None,
        options.slo_classes(
            "A class of requests with SLOs: their attainment is reported, and no replica has pipeline stages or "
            "data-parallel attention. Repeatable."
        ),
    ] = None,
    out: Annotated[
        Path | None, options.new_file_or_stdout("Write the plan to this file; - for standard output.")
    ] = None,
    plot: Annotated[
        bool,
        typer.Option(
            help="Plot latency and cost against quality, and the tiers on the nodes: PNG and SVG next to the file of --out."
        ),
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="rate, quality or gpus: a plan for each of several values, as a table. With values: rate=5,10,20."
        ),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Publish the plan: the mesh adopts its thresholds and instance counts.")
    ] = False,
    render: Annotated[
        str | None,
        typer.Option(
            help="compose: write a mesh file and a compose file with the flags of SGLang next to the file of --out."
        ),
    ] = None,
    force: plan_publishing.ForceOption = False,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Compute a plan for a cascade: GPUs, parallelism and thresholds for a trace and judged prompts. Needs no mesh."""
    if context.invoked_subcommand is not None:
        return
    for name, requested in (("--plot", plot), ("--render", render is not None)):
        if requested:
            options.require_out(name, out)
    if sweep is not None and (apply or render is not None or slo):
        fail("--sweep computes several plans: it goes without --apply, --render and --slo", 2)
    if render is not None:
        _check_form(render)
    from penstock.question_files.questions import QuestionSource

    quiet = json or out == options.STDOUT
    with planner_error_handling(json=quiet):
        files = {"cluster": cluster, "models": models, "trace": trace, "quality": quality}
        aims = {"goal": goal, "min_quality": min_quality, "max_latency_s": max_latency, "rate": rate}
        limits = {"max_utilisation": max_utilisation, "gpus": gpus, "seed": seed}
        source = QuestionSource(question, **files, **aims, **limits)
        if apply:
            _refuse_other_mesh(source, admin, force=force)
        question_file = source.read()
        if sweep is not None:
            plan_sweep.run(sweep, question_file.question, out=out, plot=plot, json=json)
            return
        file = _computed(question_file, slo or [], out, plot=plot, quiet=quiet)
    if render is not None:
        assert out is not None
        written = _rendered(out)
        if not json:
            print_written(*written)
    if apply:
        plan_publishing.publish(file, "", admin, force=force, json=False, quiet=json)


def _refuse_other_mesh(source: "QuestionSource", admin: str | None, *, force: bool) -> None:
    """End the command if the mesh would refuse the plan, before it is computed."""
    options = source.options()
    tiers = [PlannedTier(tier.name, tier.model.name or tier.name) for tier in source.models().tiers]
    with targets.planner(admin) as planner:
        current = planner.get_plan()
    if options.max_tiers is not None:  # those of the mesh may be chosen
        served = {tier.name for tier in current.tiers}
        tiers = [tier for tier in tiers if tier.name in served]
    plan_publishing.refuse_other_models(current, tiers, force=force)


def _computed(
    question_file: "QuestionFile", slo: Sequence[str], out: Path | None, *, plot: bool, quiet: bool
) -> "PlanFile":
    """Compute, write and show a plan."""
    from penstock.planner_service.api import plans
    from penstock.planner_service.codecs.plan_file import PlanFile, plan_inputs

    classes = slo_attainment.read_classes(slo)
    with spinner(quiet=quiet) as progress:
        bar = progress.add_task("planning", total=None)

        def say(text: str) -> None:
            progress.update(bar, description=text)

        planned = plans.plan(
            question_file.question, lambda n: say(f"planning: {n} routings tried"), for_slos=bool(classes)
        )
        say("planning for more quality or without the guarantee, for comparison")
        report = planned.compared(classes)
        file = PlanFile(report, plan_inputs(question_file, report))
        written = []
        if out is not None and out != options.STDOUT:
            out.write_text(json_module.dumps(file.to_json(), indent=1) + "\n")
            written.append(out)
            if plot:
                say("drawing the frontier")
                written += plan_plots.plot_frontiers(*planned.frontiers(), report, out)
                written += plan_plots.plot_nodes(planned.node_layout(), report, out)
    if quiet:
        print_json(file.to_json())
    else:
        plan_report.show(report, question_file.question.rules, written)
        slo_attainment.show(report.slo)
    return file


@needs_extra("plan render", "planner")
def render_(
    file: Annotated[Path, typer.Argument(help="A plan file of `penstock plan`.")],
    form: Annotated[str, typer.Option("--to", help="compose.")],
) -> None:
    """Write the compose file of a plan: SGLang servers with their flags, workers and the other services."""
    _check_form(form)
    print_written(*_rendered(file))


def _check_form(form: str) -> None:
    if form != "compose":
        fail(f"--render must be compose, not {form}; for Kubernetes: penstock values --plan", 2)


def _rendered(plan: Path) -> list[Path]:
    """Write the mesh file and the compose file of a plan next to it; return their paths."""
    from penstock.planner_service.api.deployments import manifests
    from penstock.planner_service.codecs.plan_file import read_plan

    with planner_error_handling():
        texts = manifests(read_plan(plan), plan.with_suffix(".mesh.yaml").name)
    for suffix, text in texts.items():
        plan.with_suffix(suffix).write_text(text)
    return [plan.with_suffix(suffix) for suffix in texts]


app.command("new")(new_question.new)
app.command("apply")(plan_publishing.apply)
app.command("capacity")(plan_capacity.capacity)
app.command("show")(plan_revisions.show)
app.command("set")(plan_revisions.set_)
app.command("render")(render_)
app.command("history")(plan_revisions.history)
app.command("rollback")(plan_revisions.rollback)
