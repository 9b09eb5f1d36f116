"""`penstock plan`: compute a plan for a cascade; show and change the plan of a mesh."""

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from penstock.cli import options, plan_changes, plan_diff, planning, rendering, targets
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
from penstock.cli.plan_changes import PlannedTier
from penstock.cli.plan_report import burst_table, long_answers_line
from penstock.client.plans import (
    BurstLadder,
    BurstStep,
    BurstThreshold,
    EarlyCheck,
    LongAnswers,
    Plan,
    Prediction,
    Stage,
    TierPlan,
)

if TYPE_CHECKING:
    from services.domain.bursts import BurstLadder as PlannedLadder

MAX_LATENCY_S = 86_400.0
MAX_CONFIDENCE = 0.999999
MAX_PERCENTILE = 99.99
MAX_EARLY_ERROR = 0.5

ForceOption = Annotated[bool, typer.Option("--force", help="Publish the plan although it was made for other models.")]

app = typer.Typer(
    no_args_is_help=True, help="Compute a plan for a cluster, or show and change the current plan of a mesh."
)


@app.callback(invoke_without_command=True)
@needs_extra("plan", "planner")
def plan(
    context: typer.Context,
    cluster: Annotated[Path | None, typer.Option("--cluster", help="YAML file: GPUs and nodes.")] = None,
    models: Annotated[Path | None, typer.Option("--models", help="YAML file: the tiers and their models.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="CSV file, may be gzipped: arrival_s, input_tokens, output_tokens.")
    ] = None,
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
    dispatch: options.Dispatch = "capacity",
    skip: Annotated[
        bool,
        typer.Option(
            "--skip/--no-skip",
            help="Also choose below which predicted score a tier is passed over; --quality then needs predicted scores.",
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
    force: ForceOption = False,
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
        with planning.planner_error_handling():
            tiers = planning.planned_tiers(cluster, models)
        listeners = targets.resolve_admin(admin)
        with cli_error_handling(listeners), targets.planner_client(listeners) as planner:
            current = planner.get_plan()
        if max_tiers is not None:  # those of the mesh may be chosen
            served = {tier.name for tier in current.tiers}
            tiers = [tier for tier in tiers if tier.name in served]
        _refuse_other_models(current, tiers, force=force)
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
        dispatch=dispatch,
        skip=skip,
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
        _report(rendering.render(out, render), quiet=json)
    if apply:
        _apply(figures, "", admin, force=force, json=False, quiet=json)


@app.command("apply")
@needs_extra("plan apply", "planner")
def apply_(
    file: Annotated[Path, typer.Argument(help="A plan file of `penstock plan`.")],
    note: Annotated[str, typer.Option("--note", help="Note for the history.")] = "",
    force: ForceOption = False,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Publish a plan file: the mesh adopts its thresholds and instance counts.

    A plan for models that the mesh does not serve is refused.
    """
    from planner_service.plan_file import read_figures

    with planning.planner_error_handling():
        figures = read_figures(file)
    _apply(figures, note, admin, force=force, json=json, quiet=False)


@app.command("diff")
@needs_extra("plan diff", "planner")
def diff(
    old: Annotated[Path, typer.Argument(help="A plan file of `penstock plan`: what runs.")],
    new: Annotated[Path, typer.Argument(help="A plan file of `penstock plan`: what is to run.")],
    load_gb_per_s: Annotated[
        float,
        options.number(
            "--load-gb-per-s", help="Rate at which a replica loads its weights.", least=0, most=10_000, above=True
        ),
    ] = 2.0,
    start_s: Annotated[
        float,
        options.number(
            "--start-s", help="Seconds that an engine takes to start, in addition to loading.", least=0, most=86_400
        ),
    ] = 30.0,
    json: targets.Json = False,
) -> None:
    """Compare two plan files, and say what the move costs before it is applied: steps, time, memory. Needs no mesh."""
    plan_diff.diff(old, new, load_gb_per_s, start_s, json=json)


@app.command("capacity")
@needs_extra("plan capacity", "planner")
def capacity(
    cluster: Annotated[Path, typer.Option("--cluster", help="YAML file: GPUs and nodes.")],
    models: Annotated[Path, typer.Option("--models", help="YAML file: the tiers and their models.")],
    trace: Annotated[
        Path, typer.Option("--trace", help="CSV file, may be gzipped: arrival_s, input_tokens, output_tokens.")
    ],
    slo: Annotated[list[str], options.slo_classes("--slo", help="A class of requests with SLOs. Repeatable.")],
    attainment: Annotated[
        float,
        options.number(
            "--attainment", help="Share of the SLOs to attain, of all that arrive.", least=0, most=1, above=True
        ),
    ] = 0.9,
    tier: Annotated[str | None, typer.Option("--tier", help="Tier of the models file; default: the last.")] = None,
    requests: options.ReplayedRequests = None,
    rate: options.TraceRate = None,
    seed: Annotated[int, options.seed("--seed", help="Seed of the stretch of the trace and of the classes.")] = 1,
    json: targets.Json = False,
) -> None:
    """Compute the fewest GPUs with which a trace attains its SLOs, for one tier, and the rate that they sustain."""
    planning.capacity(cluster, models, trace, tier, slo, attainment, requests, rate, seed, json)


@app.command("show")
def show(
    revision: Annotated[
        int | None,
        options.number(
            "--revision", help="Revision to show; default: the current one.", least=1, most=options.MAX_SEED
        ),
    ] = None,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Show the current plan."""
    listeners = targets.resolve_admin(admin)
    with cli_error_handling(listeners), targets.planner_client(listeners) as planner:
        _print(planner.get_plan(revision), json=json)


@app.command("set")
def set_(
    threshold: Annotated[
        list[str] | None,
        typer.Option("--threshold", help="TIER=SCORE: accept answers of the tier with at least this score."),
    ] = None,
    instances: Annotated[
        list[str] | None,
        typer.Option(
            "--instances", help="TIER=COUNT: number of workers; `penstock up` starts or stops workers accordingly."
        ),
    ] = None,
    scorer: Annotated[str | None, typer.Option("--scorer", help="Scorer of the judge.")] = None,
    note: Annotated[str, typer.Option("--note", help="Note for the history.")] = "",
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Publish the current plan with some values changed. Routers adopt it at once; no request is dropped."""
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
            fail(f"--threshold {option}: a score must be from 0 to 100", 2)
    counts = tier_counts("--instances", instances or [])
    listeners = targets.resolve_admin(admin)
    with cli_error_handling(listeners), targets.planner_client(listeners) as planner:
        plan = planner.get_plan()
        unknown = {*changes, *counts} - {t.name for t in plan.tiers}
        if unknown:
            fail(f"no tier {', '.join(sorted(unknown))}", 2)
        tiers = tuple(
            _changed(t, changes.get(t.name, t.threshold), counts.get(t.name, t.instances)) for t in plan.tiers
        )
        changed = dataclasses.replace(
            plan,
            tiers=tiers,
            scorer=plan.scorer if scorer is None else scorer,
            source="operator",
            note=note,
            prediction=None,
            burst=None if changes or counts else plan.burst,
        )
        if changed.burst is not plan.burst:
            errors.print("The burst ladder was planned for other thresholds or instances: it is removed")
        _print(planner.set_plan(changed, expected_revision=plan.revision), json=json)


def _changed(tier: TierPlan, threshold: float | None, instances: int) -> TierPlan:
    """The tier with new values. Its length stages keep their ranges, and share the instances as before."""
    from services.domain.stages import Stage as PlannedStage
    from services.domain.stages.places import with_instances

    planned = tuple(PlannedStage(s.from_tokens, s.to_tokens, s.instances) for s in tier.stages)
    shared = with_instances(planned, instances)
    if planned and not shared:
        errors.print(
            f"{tier.name} has fewer instances ({instances}) than length stages ({len(planned)}): they are removed"
        )
    stages = tuple(Stage(s.from_tokens, s.to_tokens, s.instances) for s in shared)
    return dataclasses.replace(tier, threshold=threshold, instances=instances, stages=stages)


@app.command("render")
@needs_extra("plan render", "planner")
def render_(
    file: Annotated[Path, typer.Argument(help="A plan file of `penstock plan`.")],
    form: Annotated[str, typer.Option("--to", help="compose or kubernetes.")],
) -> None:
    """Write the manifests of a plan: SGLang servers with their flags, workers and the other services."""
    _report(rendering.render(file, form), quiet=False)


@app.command("history")
def history(
    limit: Annotated[int, options.number("--limit", "-n", help="Number of revisions.", least=1, most=1000)] = 20,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """List the last plans with their source, note and predicted figures."""
    listeners = targets.resolve_admin(admin)
    with cli_error_handling(listeners), targets.planner_client(listeners) as planner:
        plans = planner.list_plans(limit)
    if json:
        print_json(plans)
        return
    for p in plans:
        created = datetime.fromtimestamp(p.created_at).isoformat(" ", "seconds")
        lines = [f"plan {p.revision}  {created}  {p.source}" + (f": {p.note}" if p.note else "")]
        lines += [
            f"  {t.name}: {t.instances} x {t.model}" + ("" if t.threshold is None else f", threshold {t.threshold:g}")
            for t in p.tiers
        ]
        if p.prediction is not None:
            lines.append(f"  predicted: {_predicted(p.prediction)}")
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


@app.command("rollback")
def rollback(
    revision: Annotated[
        int | None,
        typer.Argument(
            help="Revision to go back to; default: the one before the current plan.",
            callback=options.within(1, options.MAX_SEED),
        ),
    ] = None,
    note: Annotated[str, typer.Option("--note", help="Note for the history.")] = "",
    force: ForceOption = False,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Publish an earlier plan again under a new revision: its thresholds, instances, scorer and policy."""
    listeners = targets.resolve_admin(admin)
    with cli_error_handling(listeners), targets.planner_client(listeners) as planner:
        current = planner.get_plan()
        if revision is None and current.source == "rollback":
            fail(
                f"plan {current.revision} is a rollback itself ({current.note}): give the revision to go back to; "
                "see `penstock plan history`",
                2,
            )
        target_revision = current.revision - 1 if revision is None else revision
        if target_revision < 1:
            fail(f"plan {current.revision} is the first plan", 2)
        if target_revision == current.revision:
            fail(f"plan {target_revision} is the current one", 2)
        earlier = planner.get_plan(target_revision)
        tiers = [PlannedTier(t.name, t.model, t.threshold, t.instances, drafters=t.drafters) for t in earlier.tiers]
        _refuse_other_models(current, tiers, force=force)
        if not json:
            plan_changes.show(console, current, tiers)
        same = tuple(dataclasses.replace(t, drafters=()) for t in earlier.tiers)  # the planner knows what workers load
        plan = dataclasses.replace(earlier, tiers=same, source="rollback", note=note or f"to plan {target_revision}")
        _print(planner.set_plan(plan, expected_revision=current.revision), json=json)


def _apply(figures: dict[str, Any], note: str, admin: str | None, *, force: bool, json: bool, quiet: bool) -> None:
    """Publish the tiers of a plan file. The scorer and the policy of the current plan stay."""
    from planner_service.mesh_tiers import mesh_ladder, mesh_tiers
    from planner_service.plan_file import drafters_of, early_rules_of, instances_of, ladder_of, long_answers_of

    listeners = targets.resolve_admin(admin)
    with cli_error_handling(listeners), targets.planner_client(listeners) as planner:
        current = planner.get_plan()
        instances = [instances_of(tier) for tier in figures["tiers"]]
        per_tier = mesh_tiers(figures["thresholds"], instances)
        planned = [
            PlannedTier(tier["name"], tier["model"], threshold, count, tier["gpus"], drafters_of(tier).names)
            for tier, (threshold, count) in zip(figures["tiers"], per_tier, strict=True)
        ]
        _refuse_other_models(current, planned, force=force)
        if not (quiet or json):
            plan_changes.show(console, current, planned)
        prediction = Prediction(
            figures["objective"],
            figures.get("target", ""),
            figures.get("workload_digest", ""),
            figures["quality"],
            figures["latency_p95_s"],
            figures["end_to_end_p95_s"],
        )
        changed = [_changed(t, threshold, count) for t, (threshold, count) in zip(current.tiers, per_tier, strict=True)]
        if "skip_below" in figures:
            limits = [*figures["skip_below"], None]
            changed = [dataclasses.replace(t, skip_below=limit) for t, limit in zip(changed, limits, strict=True)]
        if "long_answers" in figures:
            long = long_answers_of(figures) or (None,) * (len(changed) - 1)
            sdk_rules = (None if r is None else LongAnswers(r.from_tokens, r.threshold) for r in (*long, None))
            changed = [dataclasses.replace(t, long_answers=r) for t, r in zip(changed, sdk_rules, strict=True)]
        if rules := early_rules_of(figures):
            checks = [tuple(EarlyCheck(c.after_tokens, c.reject_below) for c in rule.checks) for rule in rules]
            changed = [dataclasses.replace(t, early_checks=c) for t, c in zip(changed, [*checks, ()], strict=True)]
        else:
            changed = _without_unfit_checks(current, changed, is_without=bool(figures.get("early_reason")))
        ladder = ladder_of(figures)
        plan = dataclasses.replace(
            current,
            tiers=tuple(changed),
            source="planned",
            note=note,
            prediction=prediction,
            burst=None if ladder is None else _published(mesh_ladder(ladder, instances)),
        )
        published = planner.set_plan(plan, expected_revision=current.revision)
    if not quiet:
        _print(published, json=json)


def _without_unfit_checks(current: Plan, changed: Sequence[TierPlan], *, is_without: bool) -> list[TierPlan]:
    """The tiers without early checks that were fitted to higher thresholds, or without the plan's rule for long answers.

    They would reject more answers that stand.

    is_without: the plan was made to have no checks at all.
    """
    tiers = []
    for before, tier in zip(current.tiers, changed, strict=True):
        lower = tier.threshold is None or (before.threshold is not None and tier.threshold < before.threshold)
        lower = lower or (tier.long_answers is not None and tier.long_answers != before.long_answers)
        if tier.early_checks and (is_without or lower):
            why = "the plan is better without them" if is_without else "they were fitted where fewer answers stood"
            errors.print(
                f"early checks of tier {tier.name} are removed: {why}", markup=False, highlight=False, soft_wrap=True
            )
            tier = dataclasses.replace(tier, early_checks=())
        tiers.append(tier)
    return tiers


def _published(ladder: "PlannedLadder") -> BurstLadder:
    """A ladder of the planner as the SDK has it."""
    return BurstLadder(
        ladder.mean_quality,
        tuple(
            BurstStep(
                tuple(BurstThreshold(rule.score, rule.tie_share) for rule in step.thresholds),
                step.quality,
                step.rate_per_s,
                step.tier,
                step.tier_share,
            )
            for step in ladder.steps
        ),
    )


def _refuse_other_models(current: Plan, planned: list[PlannedTier], *, force: bool) -> None:
    """End the command if a plan is for other tiers or, without --force, for other models or drafters; show the changes."""
    if reason := plan_changes.other_tiers(current, planned):
        plan_changes.show(errors, current, planned)
        fail(reason, 2)
    if (reason := plan_changes.other_models(current, planned)) and not force:
        plan_changes.show(errors, current, planned)
        fail(f"the plan is for other models: {reason}; publish it anyway with --force", 2)
    if (reason := plan_changes.other_drafters(current, planned)) and not force:
        plan_changes.show(errors, current, planned)
        advice = (
            "set tiers[].speculation in the mesh file and start the workers again, or publish it anyway with --force"
        )
        fail(f"the plan is for other drafters: {reason}; workers load drafters when they start: {advice}", 2)


def _report(written: list[Path], *, quiet: bool) -> None:
    if not quiet:
        print_written(*written)


def _predicted(prediction: Prediction) -> str:
    reached = f"quality {prediction.quality:.1f}, p95 {seconds(prediction.latency_p95_s)}"
    return f"{reached}, end to end {seconds(prediction.end_to_end_p95_s)} (target: {prediction.target})"


def _print(plan: Plan, *, json: bool) -> None:
    if json:
        print_json(plan)
        return
    table = Table(title=f"plan {plan.revision} ({plan.source}{': ' + plan.note if plan.note else ''})")
    drafts = any(t.drafters for t in plan.tiers)
    for name in ("tier", "model", "threshold", "instances", *(("drafters",) if drafts else ())):
        table.add_column(name)
    for t in plan.tiers:
        drafters = (", ".join(t.drafters) or "-",) if drafts else ()
        table.add_row(t.name, t.model, "-" if t.threshold is None else f"{t.threshold:g}", str(t.instances), *drafters)
    console.print(table)
    if any(t.long_answers for t in plan.tiers):
        console.print(long_answers_line((t.name, t.long_answers) for t in plan.tiers), highlight=False)
    if plan.burst is not None:
        console.print(burst_table(plan.burst, [t.name for t in plan.tiers]))
    if plan.prediction is not None:
        console.print(f"predicted: {_predicted(plan.prediction)}; workload {plan.prediction.workload_digest}")
    console.print(f"scorer {plan.scorer or '(the default)'}, judge unavailable: {plan.judge_unavailable}")
