"""`penstock plan diff`: what changes from one plan file to another, and what the move costs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from penstock.cli import options, targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import console, print_json, seconds
from penstock.cli.planner_errors import planner_error_handling
from penstock.services.acceptance.pipeline import OF_PLANS

if TYPE_CHECKING:
    from penstock.planner_service.planning.plan_move import PlanMove

FIGURES = (("quality", "quality"), ("latency_p95_s", "p95 of the slowest tier"), ("end_to_end_p95_s", "p95 end to end"))


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
    from penstock.planner_service import api
    from penstock.planner_service.codecs.plan_file import plan_to_json, read_plan

    with planner_error_handling():
        before, after = read_plan(old), read_plan(new)
        move = api.move(before, after, load_gb_per_s, start_s)
    figures = [plan_to_json(file.plan) for file in (before, after)]
    if json:
        print_json(_json(figures, move))
        return
    _show(figures, move, old.name, new.name)


def _json(figures: list[dict[str, Any]], move: "PlanMove") -> dict[str, Any]:
    tiers = [
        {
            "name": old["name"],
            **{name: [old[name], new[name]] for name in ("model", "gpus", "replicas", "share_processed")},
            "threshold": thresholds,
            "speculation": [old.get("speculation"), new.get("speculation")],
        }
        for old, new, thresholds in zip(figures[0]["tiers"], figures[1]["tiers"], _thresholds(figures), strict=True)
    ]
    names = ("quality", "latency_p95_s", "end_to_end_p95_s", "cost", "rate_per_s", "breaks_at_rate", "burst")
    return {
        "tiers": tiers,
        **{rule.field: [each[rule.field] for each in figures] for rule in OF_PLANS},
        "cached_share": _cached_shares(figures),
        **{name: [each.get(name) for each in figures] for name in names},
        "move": {
            "seconds": move.seconds,
            "replicas_kept": move.unchanged,
            "loaded_gb": move.loaded_bytes / 1e9,
            "extra_gpus": move.extra_gpus,
            "extra_memory_gb": move.extra_bytes / 1e9,
            "steps": [
                {
                    "stops": [_replicas(one) for one in step.stops],
                    "starts": [_replicas(one) for one in step.starts],
                    "seconds": step.seconds,
                    "tiers_that_serve_less": step.early,
                }
                for step in move.steps
            ],
        },
    }


def _replicas(one: Any) -> dict[str, Any]:
    return {"tier": one.tier, **asdict(one.shape.times(one.count))}


def _thresholds(figures: list[dict[str, Any]]) -> list[list[float | None]]:
    """By tier, the old threshold and the new; None for one that is not used, and for the last."""
    return [list(pair) for pair in zip(*([*each["thresholds"], None] for each in figures), strict=True)]


def _cached_shares(figures: list[dict[str, Any]]) -> list[float]:
    """Of the prompt tokens."""
    return [each["cached_share"] for each in figures]


def _show(figures: list[dict[str, Any]], move: "PlanMove", old: str, new: str) -> None:
    table = Table(title=f"From {old} to {new}")
    for column in ("", old, new):
        table.add_column(column, overflow="fold")
    for i, (before, after) in enumerate(zip(figures[0]["tiers"], figures[1]["tiers"], strict=True)):
        name, thresholds = before["name"], _thresholds(figures)[i]
        if before["model"] != after["model"]:
            table.add_row(f"{name}: model", before["model"], after["model"])
        table.add_row(f"{name}: replicas", _groups(before), _groups(after))
        drafts = _drafts(before), _drafts(after)
        if drafts[0] != drafts[1]:
            table.add_row(f"{name}: drafts", *drafts)
        if thresholds[0] != thresholds[1]:
            table.add_row(f"{name}: threshold", *("not used" if h is None else f"{h:.4g}" for h in thresholds))
    for rule in OF_PLANS:
        if any(values := [each[rule.field] for each in figures]):
            table.add_row(rule.title, *map(rule.words, values))
    shares = _cached_shares(figures)
    if any(shares):
        table.add_row("cached prompt tokens", *(f"{share:.1%}" for share in shares))
    for field, words in FIGURES:
        table.add_row(
            words, *(f"{each[field]:.2f}" if field == "quality" else seconds(each[field]) for each in figures)
        )
    table.add_row("cost", *(_cost(each) for each in figures))
    table.add_row("breaks at, requests/s", *(_rate(each.get("breaks_at_rate")) for each in figures))
    ladders = [each.get("burst") for each in figures]
    if any(ladders):
        table.add_row(
            "burst: mean quality that holds", *(f"{one['mean_quality']:g}" if one else "-" for one in ladders)
        )
        for i in range(max(len(one["steps"]) for one in ladders if one)):
            table.add_row(f"burst: step {i}", *(_step(one, i) for one in ladders))
    console.print(table)
    if shares[0] != shares[1]:
        console.print(
            "The plans count on different shares of cached prompt tokens: their times are not of the same work.",
            highlight=False,
            soft_wrap=True,
        )
    if not move.steps:
        console.print(f"No replica starts or stops: only {_changed_words(figures)}, at once.")
        return
    for number, step in enumerate(move.steps, 1):
        console.print(f"{number}. {step}", highlight=False, soft_wrap=True)
    console.print(
        f"about {move.seconds:.0f} s; {move.unchanged} replicas stay; "
        f"{move.loaded_bytes / 1e9:.0f} GB of weights are loaded, "
        f"{move.extra_bytes / 1e9:.0f} GB of them on {move.extra_gpus} GPUs in addition to those of replicas that still run",
        highlight=False,
        soft_wrap=True,
    )


def _changed_words(figures: list[dict[str, Any]]) -> str:
    """What changes where all replicas stay."""
    old, new = figures
    changed = [rule.subject for rule in OF_PLANS if old[rule.field] != new[rule.field]]
    if changed and all(before == after for before, after in _thresholds(figures)):
        return f"{' and '.join(changed)} change{'s' if len(changed) == 1 else ''}"
    return f"{' and '.join(['thresholds', *changed])} change"


def _groups(tier: dict[str, Any]) -> str:
    from penstock.services.domain.hardware import ReplicaShape
    from penstock.types.deployments import ReplicaGroup

    groups = (f"{group['count']} x {ReplicaShape.of(ReplicaGroup(**group))}" for group in tier["replicas"])
    return "; ".join(groups) or ("remote" if tier.get("remote") else "-")


def _drafts(tier: dict[str, Any]) -> str:
    """`llama-160m, up to 7 tokens`; `-` without drafters."""
    speculation = tier.get("speculation")
    if speculation is None:
        return "-"
    names = ", ".join(drafter["model"] for drafter in speculation["drafters"])
    return f"{names}, up to {speculation['max_window']} tokens"


def _step(ladder: dict[str, Any] | None, index: int) -> str:
    """`70, -: quality 81.20 up to 32.3/s`, the thresholds first; `-` where there is no such step."""
    if ladder is None or index >= len(ladder["steps"]):
        return "-"
    step = ladder["steps"][index]
    rules = [
        "-" if score is None else f"{score:.4g}" if share == 1 else f"{score:.4g} ({share:.0%} of ties)"
        for score, share in zip(step["thresholds"], step["tie_shares"], strict=True)
    ]
    return f"{', '.join(rules)}: quality {step['quality']:.2f} up to {_rate(step['rate_per_s'])}/s"


def _cost(figures: dict[str, Any]) -> str:
    cost = figures.get("cost") or {"gpus": sum(tier["gpus"] for tier in figures["tiers"]), "dollars_per_hour": None}
    dollars = "" if cost["dollars_per_hour"] is None else f", {cost['dollars_per_hour']:,.2f} dollars per hour"
    return f"{cost['gpus']} GPUs{dollars}"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3g}"
