"""`penstock certs`: the mesh's own certificate authority."""

import socket
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.output import console, failing_on, needs_extra

app = typer.Typer(no_args_is_help=True)

USUAL_DAYS, MAX_DAYS = 365, 3650
FolderOption = Annotated[Path, typer.Option(help="Folder of the certificates (tls.folder of the mesh file).")]
DaysOption = Annotated[int, options.number("Days that the certificates are valid.", 1, MAX_DAYS)]


@app.callback()
def certs() -> None:
    """Create a certificate authority for the mesh, and certificates for its roles."""


@app.command("init")
@needs_extra("certs init", "certs")
def init(
    folder: FolderOption = Path("certs"),
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address by which clients reach the routers; may be repeated.")
    ] = None,
    days: DaysOption = USUAL_DAYS,
) -> None:
    """Create an authority, and a certificate for each role: router, worker, judge, planner and admin.

    Clients find the routers at this machine's names, and at those of --host. Keep ca.key away from the mesh: only `penstock
    certs rotate` needs it.
    """
    from penstock.services.access.authority import AuthorityError, create

    hosts = dict.fromkeys(["localhost", "127.0.0.1", "::1", socket.gethostname(), *(host or ())])
    with failing_on(AuthorityError, OSError, ValueError):
        create(folder, [*hosts], days)
    console.print(f"{folder}: an authority, and certificates for {days} days", highlight=False)


@app.command("rotate")
@needs_extra("certs rotate", "certs")
def rotate(
    folder: FolderOption = Path("certs"),
    days: DaysOption = USUAL_DAYS,
    authority: Annotated[
        bool, typer.Option("--authority", help="Also replace the authority; the old one is trusted until it expires.")
    ] = False,
) -> None:
    """Issue new certificates. Running services take them up within a second; connections continue."""
    from penstock.services.access.authority import AuthorityError
    from penstock.services.access.authority import rotate as rotate_certificates

    with failing_on(AuthorityError, OSError, ValueError):
        rotate_certificates(folder, days, authority=authority)
    console.print(f"{folder}: new certificates for {days} days", highlight=False)
