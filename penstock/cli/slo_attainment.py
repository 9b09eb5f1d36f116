"""The classes of --slo, and how many of their requests attain their SLOs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from penstock.cli import options
from penstock.cli.output import console

if TYPE_CHECKING:
    from planner_service.deployment.search import Strategy
    from planner_service.site import Demand, Site
    from planner_service.slo_classes import ClassAttainment, WorkloadClass


def read_classes(texts: list[str]) -> "list[WorkloadClass]":
    """The classes of --slo, checked; none without the option."""
    from planner_service.slo_classes import WorkloadClass, check_classes

    classes = [WorkloadClass(*fields) for fields in options.parse_slo_classes("--slo", texts)]
    if classes:
        check_classes(classes)
    return classes


def simulate(
    site: "Site",
    demand: "Demand",
    thresholds: "Sequence[float]",
    strategies: "Sequence[Strategy]",
    classes: "list[WorkloadClass]",
    seed: int,
) -> "list[ClassAttainment]":
    """What each class receives of the deployment; none without classes."""
    if not classes:
        return []
    from planner_service.slo_simulation import simulate_slos

    return simulate_slos(site, demand, thresholds, strategies, classes, seed)


def classes_json(classes: "Sequence[WorkloadClass]", attainments: "Sequence[ClassAttainment]") -> list[dict[str, Any]]:
    """Times are null for a class without an SLO."""
    return [
        {
            "name": one.name,
            "ttft_s": None if one.best_effort else one.ttft_s,
            "tpot_s": None if one.best_effort else one.tpot_s,
            "share": one.share,
            "requests": result.requests,
            "admitted": None if one.best_effort else result.admitted,
            "attainment": None if one.best_effort else result.attained,
        }
        for one, result in zip(classes, attainments, strict=True)
    ]


def show(attainments: "Sequence[ClassAttainment]") -> None:
    """Print a table; nothing without classes."""
    if not attainments:
        return
    table = Table(title="SLOs, with the SLO batch policy; reply lengths known, prompts computed whole")
    for column in ("class", "requests", "admitted", "attainment"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for one in attainments:
        table.add_row(one.name, str(one.requests), f"{one.admitted:.1%}", f"{one.attained:.1%}")
    console.print(table)
