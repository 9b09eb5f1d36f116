"""`penstock values`: the values of the Helm chart for a mesh file, with or without a plan."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.output import fail, failing_on, needs_extra, planner_error_handling, print_written


@needs_extra("values", "service")
def values(
    mesh: Annotated[
        Path | None, typer.Argument(help="The mesh file. Default: one that is written for the plan of --plan.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan file of `penstock plan`: its thresholds, replicas and their GPUs.")
    ] = None,
    out: Annotated[
        Path, options.new_file_or_stdout("Write the values to this file; - for standard output.")
    ] = options.STDOUT,
) -> None:
    """Write the values of the Helm chart (deploy/helm/penstock): the mesh file, and what is placed for it."""
    from penstock.services import chart
    from penstock.services.field_problems import SettingsError

    with failing_on(SettingsError, status=2):
        if plan is not None:
            text = chart.to_yaml(_planned(plan, mesh))
        elif mesh is not None:
            text = chart.to_yaml(chart.values_of(mesh))
        else:
            fail("give a mesh file, --plan, or both", 2)
    if out == options.STDOUT:
        typer.echo(text, nl=False)
    else:
        out.write_text(text)
        print_written(out)


@needs_extra("values --plan", "planner")
def _planned(plan: Path, mesh: Path | None) -> dict[str, object]:
    from penstock.planner_service.api.deployments import planned_values
    from penstock.planner_service.codecs.plan_file import read_plan

    with planner_error_handling():
        return planned_values(read_plan(plan), mesh)
