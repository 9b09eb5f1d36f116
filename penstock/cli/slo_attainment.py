"""The classes of --slo, and how many of their requests attain their SLOs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli import options
from penstock.cli.output import console, table_of
from penstock.types.simulated import SloAttainment

if TYPE_CHECKING:
    from penstock.planner_service.replay.slo_classes import WorkloadClass


def read_classes(texts: Sequence[str]) -> "list[WorkloadClass]":
    """The classes of --slo, checked; none without the option."""
    from penstock.planner_service.replay.slo_classes import WorkloadClass, check_classes

    classes = [WorkloadClass(*fields) for fields in options.parse_slo_classes("--slo", texts)]
    if classes:
        check_classes(classes)
    return classes


def show(attainments: Sequence[SloAttainment]) -> None:
    """Print a table; nothing without classes."""
    if not attainments:
        return
    title = "SLOs, with the SLO batch policy; reply lengths known, prompts computed whole"
    table = table_of("class", "requests", "admitted", "attainment", title=title)
    for one in attainments:
        shares = ("-" if share is None else f"{share:.1%}" for share in (one.admitted, one.attainment))
        table.add_row(one.name, str(one.requests), *shares)
    console.print(table)
