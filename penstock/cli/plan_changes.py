"""What publishing a plan changes in a mesh, and whether the plan is made for the models that the mesh serves."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from penstock.client.types import Plan


@dataclass(frozen=True, slots=True)
class WantedTier:
    """A tier of a plan that is to be published. gpus: None where the plan does not say."""

    name: str
    model: str
    threshold: float | None = None
    instances: int | None = None
    gpus: int | None = None


def other_tiers(current: Plan, wanted: Sequence[WantedTier]) -> str:
    """Why a plan cannot be published in this mesh at all: its tiers are others. Empty: they are the same."""
    planned, served = [tier.name for tier in wanted], [tier.name for tier in current.tiers]
    if planned == served:
        return ""
    return f"the plan has the tiers {', '.join(planned)}, the mesh has {', '.join(served)}"


def other_models(current: Plan, wanted: Sequence[WantedTier]) -> str:
    """Why a plan should not be published in this mesh: it was made for other models. Empty: for these."""
    pairs = zip(current.tiers, wanted, strict=True)
    different = [
        f"{tier.name} is planned for {planned.model}, the mesh serves {tier.model}"
        for tier, planned in pairs
        if not same_model(tier.model, planned.model)
    ]
    return "; ".join(different)


def same_model(served: str, planned: str) -> bool:
    """Whether a mesh's model is the planned one: `Qwen/Qwen2.5-7B-Instruct` is a `qwen2.5-7b`.

    Organisation and case do not matter, and what is served may go on where the plan's name, which stands for a shape, ends.
    """
    ours, theirs = (name.rpartition("/")[2].lower() for name in (served, planned))
    return ours == theirs or (bool(theirs) and ours.startswith(f"{theirs}-"))


def show(console: Console, current: Plan, wanted: Sequence[WantedTier]) -> None:
    """A table of what the mesh follows now and what it would follow."""
    table = Table(title=f"against plan {current.revision}", title_justify="left")
    for name in ("tier", "model", "instances", "GPUs", "threshold"):
        table.add_column(name, overflow="fold")
    planned = {tier.name: tier for tier in wanted}
    served = {tier.name: tier for tier in current.tiers}
    for name in dict.fromkeys((*served, *planned)):
        old, new = served.get(name), planned.get(name)
        table.add_row(
            name,
            _change(old.model if old else None, new.model if new else None),
            _change(old.instances if old else None, new.instances if new else None),
            "-" if new is None or new.gpus is None else str(new.gpus),
            _change(old.threshold if old else None, new.threshold if new else None),
        )
    console.print(table)


def _change(old: float | str | None, new: float | str | None) -> str:
    before, after = (
        "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in (old, new)
    )
    return before if before == after else f"{before} -> {after}"
