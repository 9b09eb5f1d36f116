"""`penstock keys`: create, list and revoke API keys."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import options, targets
from penstock.cli.output import console, fail, failing_on, needs_extra, print_json, print_line, table_of

if TYPE_CHECKING:
    from penstock.services.access.api_keys import ApiKey, KeyFile
    from penstock.services.mesh_schema.mesh import MeshFile

app = typer.Typer(no_args_is_help=True)

MAX_DAYS = 36_500
MeshFileOption = Annotated[Path, typer.Option("--mesh", "-m", help="The mesh file, which names the key file.")]


@app.callback()
def keys() -> None:
    """Create, list and revoke API keys."""


@app.command("create")
@needs_extra("keys create", "service")
def create(
    tenant: Annotated[str, typer.Argument(help="The tenant that the key belongs to.")],
    note: Annotated[str, typer.Option(help="What the key is for.")] = "",
    days: Annotated[int | None, options.number("Days until the key expires; default: never.", 1, MAX_DAYS)] = None,
    mesh: MeshFileOption = Path("mesh.yaml"),
    json: targets.Json = False,
) -> None:
    """Create a key and print it. It is shown only now: the key file has a hash of it."""
    from penstock.services.access.api_keys import KeyFileError, new_key

    content, file = _mesh_and_file(mesh)
    names = [each.name for each in content.access.tenants]
    if tenant not in names:
        fail(f"{mesh}: access.tenants: no tenant '{tenant}'; there is {', '.join(names) or 'none'}", 2)
    now = time.time()
    key, text = new_key(tenant, now, expires_at=None if days is None else now + days * 86_400, note=note)
    with failing_on(KeyFileError):
        file.add(key)
    if json:
        print_json(_shown(key) | {"key": text})
    else:
        print_line(text)


@app.command("list")
@needs_extra("keys list", "service")
def list_keys(mesh: MeshFileOption = Path("mesh.yaml"), json: targets.Json = False) -> None:
    """List the keys."""
    from penstock.services.access.api_keys import KeyFileError

    _, file = _mesh_and_file(mesh)
    with failing_on(KeyFileError):
        rows = [_shown(key) for key in file.read()]
    if json:
        print_json(rows)
        return
    table = table_of("key id", "tenant", "state", "created", "expires", "note", words=6)
    for row in rows:
        dates = [_date(row["created_at"]), _date(row["expires_at"])]
        table.add_row(str(row["key_id"]), str(row["tenant"]), str(row["state"]), *dates, str(row["note"]))
    console.print(table)


@app.command("revoke")
@needs_extra("keys revoke", "service")
def revoke(
    key_id: Annotated[str, typer.Argument(help="The id of the key, as `penstock keys list` shows it.")],
    mesh: MeshFileOption = Path("mesh.yaml"),
    json: targets.Json = False,
) -> None:
    """Revoke a key. Routers refuse it within a second; running requests are not ended."""
    from penstock.services.access.api_keys import KeyFileError
    from penstock.services.domain.errors import NotFound

    _, file = _mesh_and_file(mesh)
    with failing_on(KeyFileError, NotFound):
        key = file.revoke(key_id, time.time())
    if json:
        print_json(_shown(key))
    else:
        console.print(f"key {key.key_id} of tenant {key.tenant} is revoked", highlight=False)


def _mesh_and_file(path: Path) -> "tuple[MeshFile, KeyFile]":
    """A mesh file, and the key file that it or the environment names."""
    from penstock.services.access.api_keys import KeyFile
    from penstock.services.field_problems import SettingsError
    from penstock.services.mesh_file import load_mesh_file
    from penstock.services.settings import ServiceSettings

    with failing_on(SettingsError, status=2):
        mesh = load_mesh_file(path)
        file = ServiceSettings.load(mesh_file=path).key_file(mesh)
    if file is None:
        fail(f"{path}: access.keys: missing; it names the key file", 2)
    return mesh, KeyFile(file)


def _shown(key: "ApiKey") -> dict[str, object]:
    """A key as it is shown: without its hash."""
    state = "valid" if key.is_valid(time.time()) else "revoked" if key.revoked_at is not None else "expired"
    fields = ("key_id", "tenant", "created_at", "expires_at", "revoked_at", "note")
    return {name: getattr(key, name) for name in fields} | {"state": state}


def _date(when: object) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when)) if isinstance(when, float) else "-"
