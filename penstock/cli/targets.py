"""The mesh that a command connects to."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from penstock.cli.output import cli_error_handling, fail
from penstock.client.connection import DEFAULT_ADMIN, DEFAULT_TARGET, Tls
from penstock.client.retries import RetryPolicy
from penstock.client.sync import Client
from penstock.client.sync_planner import PlannerClient
from penstock.local.runfile import RunFile, read_run_file

_Entry = TypeVar("_Entry")

FOLDER = Path(".penstock")
FOLDER_VARIABLE = "PENSTOCK_FOLDER"

INTERACTIVE = RetryPolicy(unavailable_timeout_s=3.0)
"""For interactive commands: wait for a full mesh, but not for one that is not running."""

Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        help="Routers, host:port, separated by commas. Default: PENSTOCK_TARGET, then the mesh running from the folder "
        f"(--folder of `penstock`, PENSTOCK_FOLDER, .penstock), then {DEFAULT_TARGET}.",
    ),
]
Admin = Annotated[
    str | None,
    typer.Option(
        "--admin",
        "-a",
        help="Administrative listeners of routers, host:port, separated by commas. Default: PENSTOCK_ADMIN, then the mesh "
        f"running from the folder (--folder of `penstock`, PENSTOCK_FOLDER, .penstock), then {DEFAULT_ADMIN}.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Folder = Annotated[
    Path, typer.Option(envvar=FOLDER_VARIABLE, help="Folder of the logs, the data of Redis and the run file.")
]


def folder() -> Path:
    """The folder of the mesh that commands connect to."""
    return Path(os.environ.get(FOLDER_VARIABLE) or FOLDER)


def command_for(folder: Path) -> str:
    """How `penstock` is typed for the mesh of a folder."""
    return "penstock" if folder == FOLDER else f"penstock --folder {folder}"


def _running() -> RunFile | None:
    """The mesh that runs from the folder."""
    return read_run_file(folder())


def resolve(target: str | None) -> str:
    """The routers to send requests to. Ends the command if --target or PENSTOCK_TARGET is blank."""
    if given := _given("--target", target, "PENSTOCK_TARGET"):
        return given
    return ",".join(running.grpc) if (running := _running()) is not None else DEFAULT_TARGET


def resolve_admin(admin: str | None) -> str:
    """The administrative listeners to connect to. Ends the command if --admin or PENSTOCK_ADMIN is blank."""
    if given := _given("--admin", admin, "PENSTOCK_ADMIN"):
        return given
    return ",".join(running.admin) if (running := _running()) is not None else DEFAULT_ADMIN


def api_key() -> str | None:
    """The key of requests; None without one."""
    return os.environ.get("PENSTOCK_API_KEY")


def tls() -> Tls | None:
    """The certificates in PENSTOCK_TLS_FOLDER, or those of the running mesh; None without TLS."""
    certificates = os.environ.get("PENSTOCK_TLS_FOLDER", "")
    if not certificates and (running := _running()) is not None:
        certificates = running.tls_folder
    return Tls.of_folder(Path(certificates)) if certificates else None


def all_pages(read: Callable[[str], tuple[list[_Entry], str]]) -> list[_Entry]:
    """All entries of a call that gives them page by page, each with the token of the next page."""
    entries, token = read("")
    while token:
        page, token = read(token)
        entries += page
    return entries


@contextmanager
def requests(target: str | None) -> Iterator[Client]:
    """A client of the routers that `--target` means; an error of the SDK ends the command with one line."""
    routers = resolve(target)
    with cli_error_handling(routers), Client(routers, api_key=api_key(), tls=tls(), retry=INTERACTIVE) as connected:
        yield connected


@contextmanager
def administration(admin: str | None) -> Iterator[Client]:
    """The same for administrative calls alone, to the listeners that `--admin` means."""
    listeners = resolve_admin(admin)
    with cli_error_handling(listeners), Client(listeners, admin=listeners, tls=tls()) as connected:
        yield connected


@contextmanager
def planner(admin: str | None) -> Iterator[PlannerClient]:
    """The same for the mesh's planner."""
    listeners = resolve_admin(admin)
    with cli_error_handling(listeners), PlannerClient(planner_address(listeners), tls=tls()) as connected:
        yield connected


def _given(option: str, value: str | None, variable: str) -> str:
    """The addresses given by an option, or by an environment variable; empty if there are none."""
    for name, addresses in ((option, value), (variable, os.environ.get(variable))):
        if addresses:
            if not addresses.replace(",", "").strip():
                fail(f"{name}: must be host:port, several separated by commas, not '{addresses}'", 2)
            return addresses
    return ""


def planner_address(admin: str) -> str:
    """The address of the planner's administrative listener, from the status of the routers."""
    with Client(admin, admin=admin, tls=tls()) as client:
        planners = [instance for instance in client.status().instances if instance.role == "planner"]
    if not planners:
        fail("the mesh has no planner")
    # a planner that has just died may still be listed
    return min(planners, key=lambda instance: instance.age_s).admin_address
