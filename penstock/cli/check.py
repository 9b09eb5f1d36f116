"""`penstock check`: find the problems of a mesh file without starting the mesh."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import console, errors, print_json

if TYPE_CHECKING:
    from services.mesh_schema import MeshFile


@needs_extra("check", "service")
def check(
    mesh: Annotated[Path, typer.Argument(help="The mesh file.")] = Path("mesh.yaml"), json: targets.Json = False
) -> None:
    """List all problems of a mesh file by field. The exit status is 1 if there are any.

    Checks each field, the rules between fields, and that folders, files and programs exist. Model ids at the hub are not
    looked up.
    """
    from services.mesh_check import mesh_file_problems
    from services.mesh_file import load_mesh_file

    problems = mesh_file_problems(mesh)
    if json:
        report = [{"field": p.field, "problem": p.problem} for p in problems]
        print_json({"file": str(mesh), "sound": not report, "problems": report})
    elif problems:
        for p in problems:
            line = f"{mesh}: {p.field}: {p.problem}" if p.field else p.problem
            errors.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    else:
        console.print(f"{mesh}: sound: {_summary(load_mesh_file(mesh))}", highlight=False, markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


def _summary(mesh: "MeshFile") -> str:
    """The mesh in one line: tiers with engines and workers, the judge, the number of routers."""
    tiers = ", ".join(
        f"{tier.name} ({tier.served_name}, {tier.engine}, {tier.workers} {'worker' if tier.workers == 1 else 'workers'})"
        for tier in mesh.tiers
    )
    judge = mesh.judge.default_scorer or mesh.judge.scorers[0].name
    scored_by = f"judged by {judge}" if mesh.judge.replicas else "no judge"
    routers = f"{mesh.router.replicas} {'router' if mesh.router.replicas == 1 else 'routers'}"
    processes = f" of {mesh.router.processes} processes" if mesh.router.processes > 1 else ""
    return f"{tiers}; {scored_by}; {routers}{processes}"
