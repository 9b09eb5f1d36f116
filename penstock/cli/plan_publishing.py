"""`penstock plan apply`: publish a computed plan to a mesh, unless it was made for other tiers, models or drafters."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import mesh_plan, plan_changes, targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import cli_error_handling, console, errors, fail
from penstock.cli.plan_changes import PlannedTier
from penstock.cli.planner_errors import planner_error_handling
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

ForceOption = Annotated[bool, typer.Option("--force", help="Publish the plan although it was made for other models.")]


@needs_extra("plan apply", "planner")
def apply(
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

    with planner_error_handling():
        figures = read_figures(file)
    publish(figures, note, admin, force=force, json=json, quiet=False)


def publish(figures: dict[str, Any], note: str, admin: str | None, *, force: bool, json: bool, quiet: bool) -> None:
    """Publish the tiers of a plan file. The scorer and the policy of the current plan stay."""
    from planner_service.mesh_tiers import mesh_ladder, mesh_tiers
    from planner_service.plan_file import (
        best_answer_of,
        drafters_of,
        early_rules_of,
        instances_of,
        ladder_of,
        long_answers_of,
    )

    listeners = targets.resolve_admin(admin)
    with cli_error_handling(listeners), targets.planner_client(listeners) as planner:
        current = planner.get_plan()
        instances = [instances_of(tier) for tier in figures["tiers"]]
        per_tier = mesh_tiers(figures["thresholds"], instances)
        planned = [
            PlannedTier(tier["name"], tier["model"], threshold, count, tier["gpus"], drafters_of(tier).names)
            for tier, (threshold, count) in zip(figures["tiers"], per_tier, strict=True)
        ]
        refuse_other_models(current, planned, force=force)
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
        changed = [
            with_values(t, threshold, count) for t, (threshold, count) in zip(current.tiers, per_tier, strict=True)
        ]
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
            best_answer=best_answer_of(figures) if "best_answer" in figures else current.best_answer,
            burst=None if ladder is None else _published(mesh_ladder(ladder, instances)),
        )
        published = planner.set_plan(plan, expected_revision=current.revision)
    if not quiet:
        mesh_plan.show(published, json=json)


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


def with_values(tier: TierPlan, threshold: float | None, instances: int) -> TierPlan:
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


def planned_tiers(cluster: Path, models: Path) -> list[PlannedTier]:
    """The tiers of a models file, with their models.

    Raises:
        FileError: A file cannot be used.
    """
    from planner_service.files import read_site

    site = read_site(cluster, models)
    return [PlannedTier(name, model.name) for name, model in zip(site.tiers, site.models, strict=True)]


def refuse_other_models(current: Plan, planned: list[PlannedTier], *, force: bool) -> None:
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
