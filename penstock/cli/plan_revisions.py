"""`penstock plan show`, `set`, `history` and `rollback`: the revisions of a mesh's plan."""

import dataclasses
from datetime import datetime
from typing import Annotated

import typer

from penstock.cli import mesh_plan, options, targets
from penstock.cli.mesh_plan import PlannedTier
from penstock.cli.output import console, fail, print_json, print_line
from penstock.cli.plan_publishing import ForceOption, refuse_other_models, set_plan, with_values
from penstock.services.domain.hardware import ReplicaShape
from penstock.types.ranges import SCORE, Within


def show(
    revision: Annotated[
        int | None, options.number("Revision to show; default: the current one.", 1, options.MAX_SEED)
    ] = None,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Show the current plan."""
    with targets.planner(admin) as planner:
        mesh_plan.show(planner.get_plan(revision), json=json)


def set_(
    threshold: Annotated[
        list[str] | None, typer.Option(help="TIER=SCORE: accept answers of the tier with at least this score.")
    ] = None,
    instances: Annotated[
        list[str] | None,
        typer.Option(help="TIER=COUNT: number of workers; `penstock up` starts or stops workers accordingly."),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="TIER=SHAPE: of its workers, such as tp2pp1; `penstock up` replaces them."),
    ] = None,
    scorer: Annotated[str | None, typer.Option(help="Scorer of the judge.")] = None,
    note: Annotated[str, typer.Option(help="Note for the history.")] = "",
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Publish the current plan with some values changed. Routers adopt it at once; no request is dropped."""
    if not threshold and not instances and not shapes and scorer is None:
        fail("nothing to change: give --threshold, --instances, --shape or --scorer", 2)
    changes = options.tier_values("--threshold", "TIER=SCORE", threshold, _score)
    counts = options.tier_values("--instances", "TIER=COUNT", instances, options.worker_count)
    # the planner knows how many
    groups = options.tier_values("--shape", "TIER=SHAPE", shapes, lambda name: (ReplicaShape.named(name).times(1),))
    with targets.planner(admin) as planner:
        plan = planner.get_plan()
        if unknown := {*changes, *counts, *groups} - {t.name for t in plan.tiers}:
            fail(f"no tier {', '.join(sorted(unknown))}", 2)
        alone = counts.keys() - groups.keys()
        if several := [t.name for t in plan.tiers if t.name in alone and len(t.replicas) > 1]:
            fail(f"--instances {several[0]}: its workers have several shapes: give --shape, too", 2)
        tiers = tuple(
            with_values(t, changes.get(t.name, t.threshold), counts.get(t.name, t.instances), groups.get(t.name, ()))
            for t in plan.tiers
        )
        used = plan.scorer if scorer is None else scorer
        changed = dataclasses.replace(plan, tiers=tiers, scorer=used, source="operator", note=note, prediction=None)
        set_plan(planner, changed, plan, json=json)


def history(
    limit: Annotated[int, options.number("Number of revisions.", 1, 1000, "--limit", "-n")] = 20,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """List the last plans with their source, note and predicted figures."""
    with targets.planner(admin) as planner:
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
            lines.append(f"  predicted: {mesh_plan.predicted_words(p.prediction)}")
        print_line("\n".join(lines))


def rollback(
    revision: Annotated[
        int | None,
        typer.Argument(
            help="Revision to go back to; default: the one before the current plan.",
            callback=options.within(Within(1, options.MAX_SEED)),
        ),
    ] = None,
    note: Annotated[str, typer.Option(help="Note for the history.")] = "",
    force: ForceOption = False,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Publish an earlier plan again under a new revision: its thresholds, instances, scorer and policy."""
    with targets.planner(admin) as planner:
        current = planner.get_plan()
        if revision is None and current.source == "rollback":
            advice = "give the revision to go back to; see `penstock plan history`"
            fail(f"plan {current.revision} is a rollback itself ({current.note}): {advice}", 2)
        target_revision = current.revision - 1 if revision is None else revision
        if target_revision < 1:
            fail(f"plan {current.revision} is the first plan", 2)
        if target_revision == current.revision:
            fail(f"plan {target_revision} is the current one", 2)
        earlier = planner.get_plan(target_revision)
        tiers = [PlannedTier(t.name, t.model, t.threshold, t.instances, drafters=t.drafters) for t in earlier.tiers]
        refuse_other_models(current, tiers, force=force)
        if not json:
            mesh_plan.show_changes(console, current, tiers)
        # the planner knows what workers load
        same = tuple(
            dataclasses.replace(t, model=now.model, drafters=())
            for t, now in zip(earlier.tiers, current.tiers, strict=True)
        )
        plan = dataclasses.replace(earlier, tiers=same, source="rollback", note=note or f"to plan {target_revision}")
        set_plan(planner, plan, current, json=json)


def _score(text: str) -> float:
    if not SCORE.holds(score := float(text)):
        raise ValueError("a score must be from 0 to 100")
    return score
