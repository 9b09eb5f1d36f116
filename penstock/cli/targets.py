"""The mesh that a command connects to."""

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import fail
from penstock.client.connection import DEFAULT_TARGET
from penstock.client.retries import RetryPolicy
from penstock.client.sync import Client

FOLDER = Path(".penstock")

INTERACTIVE = RetryPolicy(unavailable_timeout_s=3.0)
"""For interactive commands: wait for a full mesh, but not for one that is not running."""

Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        help="Routers, host:port, separated by commas. Default: PENSTOCK_TARGET, then the mesh running from .penstock, "
        f"then {DEFAULT_TARGET}.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Folder = Annotated[Path, typer.Option("--folder", help="Folder of the logs, the data of Redis and the run file.")]


def resolve(target: str | None, folder: Path = FOLDER) -> str:
    """The routers to connect to. Ends the command if --target or PENSTOCK_TARGET is blank."""
    for name, value in (("--target", target), ("PENSTOCK_TARGET", os.environ.get("PENSTOCK_TARGET"))):
        if value:
            if not value.replace(",", "").strip():
                fail(f"{name}: must be host:port, several separated by commas, not '{value}'", 2)
            return value
    from penstock.local.runfile import read_run_file

    running = read_run_file(folder)
    return ",".join(running.grpc) if running is not None else DEFAULT_TARGET


def planner(routers: str) -> str:
    """The address of the mesh's planner, from the status of its routers."""
    with Client(routers) as client:
        planners = [instance for instance in client.status().instances if instance.role == "planner"]
    if not planners:
        fail("the mesh has no planner")
    return min(
        planners, key=lambda instance: instance.age_s
    ).address  # a planner that has just died may still be listed
