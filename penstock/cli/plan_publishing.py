"""`penstock plan apply`: publish a computed plan to a mesh, unless it was made for other tiers, models or drafters."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import mesh_plan, targets
from penstock.cli.mesh_plan import PlannedTier
from penstock.cli.output import console, errors, fail, needs_extra, planner_error_handling
from penstock.client.sync_planner import PlannerClient
from penstock.types.deployments import ReplicaGroup
from penstock.types.plans import Plan, TierPlan
from penstock.types.rules import rules_of

if TYPE_CHECKING:
    from penstock.planner_service.codecs.plan_file import PlanFile

ForceOption = Annotated[
    bool,
    typer.Option(
        "--force", help="Publish the plan although it was made for other models; workers keep their models and shapes."
    ),
]


@needs_extra("plan apply", "planner")
def apply(
    file: Annotated[Path, typer.Argument(help="A plan file of `penstock plan`.")],
    note: Annotated[str, typer.Option(help="Note for the history.")] = "",
    force: ForceOption = False,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Publish a plan file: the mesh adopts its thresholds, and the counts and shapes of its workers.

    A plan for models that the mesh does not serve is refused.
    """
    from penstock.planner_service.codecs.plan_file import read_plan

    with planner_error_handling():
        planned = read_plan(file)
    publish(planned, note, admin, force=force, json=json, quiet=False)


def publish(file: "PlanFile", note: str, admin: str | None, *, force: bool, json: bool, quiet: bool) -> None:
    """Publish a computed plan. The scorer and the policy of the current plan stay."""
    from penstock.planner_service.codecs.plan_file import served_tiers

    plan = file.plan
    with targets.planner(admin) as planner:
        current = planner.get_plan()
        served = served_tiers(plan)
        drafters = [() if t.speculation is None else tuple(d.model for d in t.speculation.drafters) for t in plan.tiers]
        planned = [
            PlannedTier(tier.name, tier.model, threshold, count, tier.gpus, names)
            for tier, names, (threshold, count) in zip(plan.tiers, drafters, served, strict=True)
        ]
        refuse_other_models(current, planned, force=force)
        if not (quiet or json):
            mesh_plan.show_changes(console, current, planned)
        changed = [
            dataclasses.replace(
                with_values(before, threshold, count, () if force else tier.replicas), **_said(file, rules_of(tier))
            )
            for before, tier, (threshold, count) in zip(current.tiers, plan.tiers, served, strict=True)
        ]
        new = dataclasses.replace(
            current, tiers=tuple(changed), source="planned", note=note, prediction=plan.prediction
        )
        set_plan(planner, dataclasses.replace(new, **_said(file, rules_of(plan))), current, json=json, quiet=quiet)


def set_plan(planner: PlannerClient, plan: Plan, current: Plan, *, json: bool, quiet: bool = False) -> None:
    """Publish a plan after the current one; show it, and which workers it replaces."""
    published = planner.set_plan(plan, expected_revision=current.revision)
    if not quiet:
        mesh_plan.show(published, json=json)
    if not (quiet or json):
        mesh_plan.show_rolls(current, published)


def _said(file: "PlanFile", rules: dict[str, Any]) -> dict[str, Any]:
    """The rules that a plan file says anything of; the others stay as the mesh has them."""
    return {name: rule for name, rule in rules.items() if name not in file.unsaid}


def with_values(
    tier: TierPlan, threshold: float | None, instances: int, replicas: Sequence[ReplicaGroup] = ()
) -> TierPlan:
    """The tier with new values. Its length stages keep their ranges, and share the instances as before.

    replicas: the instances by their shapes; empty: of the shape that they have.
    """
    from penstock.services.domain.stages.places import with_instances

    stages = with_instances(tier.stages, instances)
    if tier.stages and not stages:
        errors.print(
            f"{tier.name} has fewer instances ({instances}) than length stages ({len(tier.stages)}): they are removed"
        )
    replicas = tuple(replicas) or tier.replicas
    return dataclasses.replace(tier, threshold=threshold, instances=instances, stages=stages, replicas=replicas)


def refuse_other_models(current: Plan, planned: list[PlannedTier], *, force: bool) -> None:
    """End the command if a plan is for other tiers or, without --force, for other models or drafters; show the changes."""
    if reason := mesh_plan.reason_against(current, planned, force=force):
        mesh_plan.show_changes(errors, current, planned)
        fail(reason, 2)
