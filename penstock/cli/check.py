"""`penstock check`: what is wrong with a mesh file, without starting anything."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import console, errors, print_json

if TYPE_CHECKING:
    from services.settings import MeshFile


@needs_extra("check", "service")
def check(
    mesh: Annotated[Path, typer.Argument(help="The mesh file.")] = Path("mesh.yaml"), json: targets.Json = False
) -> None:
    """Say everything that is wrong with a mesh file, field by field; status 1 where anything is.

    Fields and how they fit together are checked, and that the folders and files it names exist. An id of the hub is not
    looked up.
    """
    from services.mesh_check import mesh_file_problems
    from services.settings import load_mesh_file

    problems = mesh_file_problems(mesh)
    if json:
        found = [{"field": p.field, "problem": p.problem} for p in problems]
        print_json({"file": str(mesh), "sound": not found, "problems": found})
    elif problems:
        for p in problems:
            line = f"{mesh}: {p.field}: {p.problem}" if p.field else p.problem
            errors.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    else:
        console.print(f"{mesh}: sound: {_summary(load_mesh_file(mesh))}", highlight=False, markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


def _summary(mesh: "MeshFile") -> str:
    """The mesh in a line: tiers with their engines and workers, who judges, how many routers."""
    tiers = ", ".join(
        f"{tier.name} ({tier.served_name}, {tier.engine}, {tier.workers} {'worker' if tier.workers == 1 else 'workers'})"
        for tier in mesh.tiers
    )
    judge = mesh.judge.default_scorer or mesh.judge.scorers[0].name
    judged = f"judged by {judge}" if mesh.judge.replicas else "no judge"
    routers = f"{mesh.router.replicas} {'router' if mesh.router.replicas == 1 else 'routers'}"
    processes = f" of {mesh.router.processes} processes" if mesh.router.processes > 1 else ""
    return f"{tiers}; {judged}; {routers}{processes}"
