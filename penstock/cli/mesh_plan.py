"""How a plan of the mesh is shown, the changes that a new one makes, and whether it was made for the models of the mesh."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from penstock.cli.output import console, print_json, print_line, seconds
from penstock.services.acceptance.pipeline import rule_lines
from penstock.services.domain.hardware import ReplicaShape, replica_words
from penstock.services.domain.plans import same_model, same_models
from penstock.services.domain.rolling import Kinds, ReplicaKind, Roll, roll_steps, step_text
from penstock.types.plans import Plan, Prediction, TierPlan


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A tier of a plan that is going to be published. gpus: None if the plan does not tell. drafters: empty if it names none:
    its profiles may have been measured with drafts."""

    name: str
    model: str
    threshold: float | None = None
    instances: int | None = None
    gpus: int | None = None
    drafters: tuple[str, ...] = ()


def show(plan: Plan, *, json: bool) -> None:
    """Print a plan: its tiers, prediction and judging."""
    if json:
        print_json(plan)
        return
    table = Table(title=f"plan {plan.revision} ({plan.source}{': ' + plan.note if plan.note else ''})")
    drafts = any(t.drafters for t in plan.tiers)
    shapes = [_shapes(tier) for tier in plan.tiers]
    shaped = any(shapes)
    more = (*(("shapes",) if shaped else ()), *(("drafters",) if drafts else ()))
    for name in ("tier", "model", "threshold", "instances", *more):
        table.add_column(name)
    for t, shape in zip(plan.tiers, shapes, strict=True):
        last = (*((shape or "-",) if shaped else ()), *((", ".join(t.drafters) or "-",) if drafts else ()))
        table.add_row(t.name, t.model, "-" if t.threshold is None else f"{t.threshold:g}", str(t.instances), *last)
    console.print(table)
    for line in rule_lines(plan, None):
        console.print(line, highlight=False)
    if plan.prediction is not None:
        console.print(f"predicted: {predicted_words(plan.prediction)}; workload {plan.prediction.workload_digest}")
    console.print(f"scorer {plan.scorer or '(the default)'}, judge unavailable: {plan.judge_unavailable}")


def _shapes(tier: TierPlan) -> str:
    """Empty where each worker has one GPU, of any type, or none."""
    plain = all(ReplicaShape.of(group) == ReplicaShape(1, 1) for group in tier.replicas)
    return "" if plain else replica_words(tier.replicas)


def predicted_words(prediction: Prediction) -> str:
    reached = f"quality {prediction.quality:.1f}, p95 {seconds(prediction.latency_p95_s)}"
    return f"{reached}, end to end {seconds(prediction.end_to_end_p95_s)} (target: {prediction.target})"


def reason_against(current: Plan, planned: Sequence[PlannedTier], *, force: bool) -> str:
    """Why the plan is not published: it is for other tiers or, without `force`, other models or drafters; empty if it is."""
    planned_names, served = [tier.name for tier in planned], [tier.name for tier in current.tiers]
    if planned_names != served:
        return f"the plan has the tiers {', '.join(planned_names)}, the mesh has {', '.join(served)}"
    if force:
        return ""
    if models := other_models(current, planned):
        changed = "which the mesh file changes (tiers[].model), no plan"
        return f"the plan is for other models, {changed}: {models}; publish it anyway with --force"
    if drafters := other_drafters(current, planned):
        advice = "set tiers[].speculation in the mesh file and start the workers again"
        loaded = f"workers load drafters when they start: {advice}, or publish it anyway with --force"
        return f"the plan is for other drafters: {drafters}; {loaded}"
    return ""


def other_models(current: Plan, planned: Sequence[PlannedTier]) -> str:
    """How the plan's models differ from those of the mesh; empty if they are the same."""
    return "; ".join(
        f"{new.name} is planned for {new.model}, the mesh serves {old.model}"
        for old, new in zip(current.tiers, planned, strict=True)
        if not same_model(old.model, new.model)
    )


def other_drafters(current: Plan, planned: Sequence[PlannedTier]) -> str:
    """How the plan's drafters differ from those that the workers of the mesh load; empty if they are the same."""
    return "; ".join(
        f"{new.name} is planned with drafts of {', '.join(new.drafters)}, its workers load "
        f"{', '.join(old.drafters) or 'nothing'}"
        for old, new in zip(current.tiers, planned, strict=True)
        if new.drafters and not same_models(old.drafters, new.drafters)
    )


def show_changes(to: Console, current: Plan, planned: Sequence[PlannedTier]) -> None:
    """Print a table of the current plan and the changes to it."""
    table = Table(title=f"changes to plan {current.revision}", title_justify="left")
    drafts = any(tier.drafters for tier in current.tiers) or any(tier.drafters for tier in planned)
    for name in ("tier", "model", *(("drafters",) if drafts else ()), "instances", "GPUs", "threshold"):
        table.add_column(name, overflow="fold")
    planned_tiers = {tier.name: tier for tier in planned}
    served = {tier.name: tier for tier in current.tiers}
    for name in dict.fromkeys((*served, *planned_tiers)):
        old, new = served.get(name), planned_tiers.get(name)
        table.add_row(
            name,
            _change(old.model if old else None, new.model if new else None),
            *((_drafters(old, new),) if drafts else ()),
            _change(old.instances if old else None, new.instances if new else None),
            "-" if new is None or new.gpus is None else str(new.gpus),
            _change(old.threshold if old else None, new.threshold if new else None),
        )
    to.print(table)


def show_rolls(before: Plan, after: Plan) -> None:
    """Print which workers replace which, in order, where a plan changes their shapes."""
    roll = Roll(_kinds(before), _kinds(after), {})
    if {(kind.tier, kind.shape) for kind in roll.running} >= {(kind.tier, kind.shape) for kind in roll.target}:
        return
    console.print("Workers are replaced where `penstock up` places them:")
    for number, step in enumerate(roll_steps(roll), 1):
        print_line(f"{number}. {step_text(step, [tier.name for tier in after.tiers])}")
    console.print("Where too few GPUs are free, old ones stop first, those that a tier misses least.", soft_wrap=True)


def _kinds(plan: Plan) -> Kinds:
    kinds = Kinds()
    for i, tier in enumerate(plan.tiers):
        kinds.update({ReplicaKind(i, ReplicaShape.of(group)): group.count for group in tier.replicas})
    return kinds


def _drafters(old: TierPlan | None, new: PlannedTier | None) -> str:
    """Of a plan that names none, those that workers load."""
    before = ", ".join(old.drafters) if old else ""
    return _change(before or "-", (", ".join(new.drafters) or before if new else "") or "-")


def _change(old: float | str | None, new: float | str | None) -> str:
    old_text, new_text = (
        "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in (old, new)
    )
    return old_text if old_text == new_text else f"{old_text} -> {new_text}"
