"""The mesh that a command connects to."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import fail
from penstock.client.connection import DEFAULT_ADMIN, DEFAULT_TARGET, Tls
from penstock.client.retries import RetryPolicy
from penstock.client.sync import Client, PlannerClient

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
Admin = Annotated[
    str | None,
    typer.Option(
        "--admin",
        "-a",
        help="Administrative listeners of routers, host:port, separated by commas. Default: PENSTOCK_ADMIN, then the mesh "
        f"running from .penstock, then {DEFAULT_ADMIN}.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Folder = Annotated[Path, typer.Option("--folder", help="Folder of the logs, the data of Redis and the run file.")]


def resolve(target: str | None, folder: Path = FOLDER) -> str:
    """The routers to send requests to. Ends the command if --target or PENSTOCK_TARGET is blank."""
    if given := _given("--target", target, "PENSTOCK_TARGET"):
        return given
    from penstock.local.runfile import read_run_file

    running = read_run_file(folder)
    return ",".join(running.grpc) if running is not None else DEFAULT_TARGET


def resolve_admin(admin: str | None, folder: Path = FOLDER) -> str:
    """The administrative listeners to connect to. Ends the command if --admin or PENSTOCK_ADMIN is blank."""
    if given := _given("--admin", admin, "PENSTOCK_ADMIN"):
        return given
    from penstock.local.runfile import read_run_file

    running = read_run_file(folder)
    return ",".join(running.admin) if running is not None else DEFAULT_ADMIN


def client(routers: str, **options: Any) -> Client:
    """A client for requests, with the API key of PENSTOCK_API_KEY if that is set."""
    return Client(routers, api_key=api_key(), tls=tls(), **options)


def api_key() -> str | None:
    """The key of requests; None without one."""
    return os.environ.get("PENSTOCK_API_KEY")


def tls(folder: Path = FOLDER) -> Tls | None:
    """The certificates in PENSTOCK_TLS_FOLDER, or those of the mesh running from .penstock; None without TLS."""
    from penstock.local.runfile import read_run_file

    certificates = os.environ.get("PENSTOCK_TLS_FOLDER", "")
    if not certificates and (running := read_run_file(folder)) is not None:
        certificates = running.tls_folder
    if not certificates:
        return None
    ca, identity = Path(certificates) / "ca.pem", Path(certificates) / "admin.pem"
    return Tls(ca if ca.exists() else None, identity if os.access(identity, os.R_OK) else None)


def admin_client(admin: str) -> Client:
    """A client for administrative calls alone."""
    return Client(admin, admin=admin, tls=tls())


def planner_client(admin: str) -> PlannerClient:
    """A client of the mesh's planner. admin: administrative listeners of the routers."""
    return PlannerClient(planner(admin), tls=tls())


def _given(option: str, value: str | None, variable: str) -> str:
    """The addresses given by an option, or by an environment variable; empty if there are none."""
    for name, addresses in ((option, value), (variable, os.environ.get(variable))):
        if addresses:
            if not addresses.replace(",", "").strip():
                fail(f"{name}: must be host:port, several separated by commas, not '{addresses}'", 2)
            return addresses
    return ""


def planner(admin: str) -> str:
    """The address of the planner's administrative listener, from the status of the routers."""
    with admin_client(admin) as client:
        planners = [instance for instance in client.status().instances if instance.role == "planner"]
    if not planners:
        fail("the mesh has no planner")
    return min(
        planners, key=lambda instance: instance.age_s
    ).admin_address  # a planner that has just died may still be listed
