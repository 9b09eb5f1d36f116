"""The changes that a plan makes to a mesh, and whether the plan was made for the models of the mesh."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from penstock.client.plans import Plan


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A tier of a plan that is going to be published. gpus: None if the plan does not tell."""

    name: str
    model: str
    threshold: float | None = None
    instances: int | None = None
    gpus: int | None = None


def other_tiers(current: Plan, planned: Sequence[PlannedTier]) -> str:
    """Why the plan's tiers differ from those of the mesh, so that it cannot be published; empty if they are the same."""
    planned_names, served = [tier.name for tier in planned], [tier.name for tier in current.tiers]
    if planned_names == served:
        return ""
    return f"the plan has the tiers {', '.join(planned_names)}, the mesh has {', '.join(served)}"


def other_models(current: Plan, planned: Sequence[PlannedTier]) -> str:
    """How the plan's models differ from those of the mesh; empty if they are the same."""
    pairs = zip(current.tiers, planned, strict=True)
    different = [
        f"{tier.name} is planned for {planned_tier.model}, the mesh serves {tier.model}"
        for tier, planned_tier in pairs
        if not same_model(tier.model, planned_tier.model)
    ]
    return "; ".join(different)


def same_model(served: str, planned: str) -> bool:
    """Whether a model of the mesh is the planned one: `Qwen/Qwen2.5-7B-Instruct` is a `qwen2.5-7b`.

    Ignores the organisation and case. A plan names the shape of a model, so the served name may have a suffix.
    """
    served_name, planned_name = (name.rpartition("/")[2].lower() for name in (served, planned))
    return served_name == planned_name or (bool(planned_name) and served_name.startswith(f"{planned_name}-"))


def show(console: Console, current: Plan, planned: Sequence[PlannedTier]) -> None:
    """Print a table of the current plan and the changes to it."""
    table = Table(title=f"changes to plan {current.revision}", title_justify="left")
    for name in ("tier", "model", "instances", "GPUs", "threshold"):
        table.add_column(name, overflow="fold")
    planned_tiers = {tier.name: tier for tier in planned}
    served = {tier.name: tier for tier in current.tiers}
    for name in dict.fromkeys((*served, *planned_tiers)):
        old, new = served.get(name), planned_tiers.get(name)
        table.add_row(
            name,
            _change(old.model if old else None, new.model if new else None),
            _change(old.instances if old else None, new.instances if new else None),
            "-" if new is None or new.gpus is None else str(new.gpus),
            _change(old.threshold if old else None, new.threshold if new else None),
        )
    console.print(table)


def _change(old: float | str | None, new: float | str | None) -> str:
    old_text, new_text = (
        "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in (old, new)
    )
    return old_text if old_text == new_text else f"{old_text} -> {new_text}"
