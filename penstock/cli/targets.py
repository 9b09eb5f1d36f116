"""Which mesh a command talks to."""

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import fail
from penstock.client.connection import USUAL_TARGET
from penstock.client.retries import RetryPolicy
from penstock.client.sync import Client

FOLDER = Path(".penstock")

INTERACTIVE = RetryPolicy(unavailable_timeout_s=3.0)
"""For who waits at a terminal: a full mesh is waited for, one that is not there is not."""

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
    """The routers to talk to; ends the command where an option or the environment names none."""
    for name, value in (("--target", target), ("PENSTOCK_TARGET", os.environ.get("PENSTOCK_TARGET"))):
        if value:
            if not value.replace(",", "").strip():
                fail(f"{name}: must be host:port, several separated by commas, not '{value}'", 2)
            return value
    from penstock.local.runfile import read_run_file

    running = read_run_file(folder)
    return ",".join(running.grpc) if running is not None else USUAL_TARGET


def planner(where: str) -> str:
    """The address of a mesh's planner, as its routers know it."""
    with Client(where) as client:
        planners = [instance for instance in client.status().instances if instance.role == "planner"]
    if not planners:
        fail("no planner is up")
    return min(planners, key=lambda instance: instance.age_s).address  # one that just died may still be listed
