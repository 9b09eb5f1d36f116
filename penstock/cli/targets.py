"""Which mesh a command talks to."""

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.client.connection import USUAL_TARGET

FOLDER = Path(".penstock")

Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        help="Routers, host:port, separated by commas. Else PENSTOCK_TARGET, else the mesh that runs from .penstock, "
        f"else {USUAL_TARGET}.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Folder = Annotated[Path, typer.Option("--folder", help="Where logs, Redis' data and the run file are.")]


def resolve(target: str | None, folder: Path = FOLDER) -> str:
    """The routers to talk to."""
    if target:
        return target
    if named := os.environ.get("PENSTOCK_TARGET"):
        return named
    from penstock.local.runfile import read_run_file

    running = read_run_file(folder)
    return ",".join(running.grpc) if running is not None else USUAL_TARGET
