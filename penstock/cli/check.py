"""`penstock check`: find the problems of a mesh file without starting the mesh."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import targets
from penstock.cli.output import errors, needs_extra, print_json, print_line

if TYPE_CHECKING:
    from penstock.services.mesh_schema.mesh import MeshFile


@needs_extra("check", "service")
def check(
    mesh: Annotated[Path, typer.Argument(help="The mesh file.")] = Path("mesh.yaml"),
    here: Annotated[bool, typer.Option("--here", help="The mesh is to run on this machine.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Notes are problems, too: such as a judge that is not calibrated.")
    ] = False,
    json: targets.Json = False,
) -> None:
    """List all problems of a mesh file by field. The exit status is 1 if there are any.

    Checks each field, the rules between fields, the options of engines, and that folders and files exist. What a machine
    lacks (a GPU, a program, a variable, a folder with an absolute path) is a note, and with `--here` a problem. Model ids
    at the hub are not looked up. Says how answers are judged and what that costs; with `--here` endpoints of tiers are asked
    for a short reply, to see whether they give log-probabilities.
    """
    from penstock.services.mesh_check import check_mesh_file
    from penstock.services.mesh_file import load_mesh_file

    findings = check_mesh_file(mesh, here=here)
    judged = [] if findings.problems else asyncio.run(_judging(load_mesh_file(mesh), here=here))
    if json:
        listed = {"problems": findings.problems, "notes": findings.notes}
        print_json({"file": str(mesh), "sound": not findings.problems, **listed, "judging": judged})
    else:
        for p in findings.problems:
            print_line(f"{mesh}: {p.field}: {p.problem}" if p.field else p.problem, style="red", to=errors)
        for p in findings.notes:
            print_line(f"{mesh}: note: {p.field}: {p.problem}", style="yellow", to=errors)
        if not findings.problems:
            print_line("\n".join([f"{mesh}: sound: {_summary(load_mesh_file(mesh))}", *judged]))
    if findings.problems or (strict and findings.notes):
        raise typer.Exit(1)


async def _judging(mesh: "MeshFile", *, here: bool) -> list[str]:
    from penstock.services.extensions.engines import engine_of
    from penstock.services.mesh_check import judging

    engines = {tier.name: (engine_of(mesh, tier), tier) for tier in mesh.tiers[:-1]}
    gives = {
        name: await engine.logprobs_now(t) if here else engine.gives_logprobs for name, (engine, t) in engines.items()
    }
    return [*judging(mesh, gives)]


def _summary(mesh: "MeshFile") -> str:
    """The mesh in one line: tiers with engines and workers, the judge, the number of routers."""
    tiers = ", ".join(
        f"{tier.name} ({tier.served_name}, {tier.engine}, {tier.workers} {'worker' if tier.workers == 1 else 'workers'})"
        for tier in mesh.tiers
    )
    scored_by = f"judged by {mesh.judge.used_scorer}" if mesh.judge.replicas else "no judge"
    routers = f"{mesh.router.replicas} {'router' if mesh.router.replicas == 1 else 'routers'}"
    processes = f" of {mesh.router.processes} processes" if mesh.router.processes > 1 else ""
    return f"{tiers}; {scored_by}; {routers}{processes}"
