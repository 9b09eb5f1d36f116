"""`penstock redis-users`: the users of a mesh for a Redis that meshes share."""

import json
import secrets
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import errors, fail, failing_on, print_line


def redis_users(
    mesh: Annotated[
        Path, typer.Option("--mesh", "-m", help="The mesh file, whose name the users and keys get.")
    ] = Path("mesh.yaml"),
    passwords: Annotated[
        Path, typer.Option(help="JSON file of the passwords by user; those that are missing are added.")
    ] = Path("redis-passwords.json"),
    redis_6: Annotated[
        bool, typer.Option("--redis-6", help="For Redis 6, which cannot keep roles from writing plans.")
    ] = False,
) -> None:
    """Print the ACL lines of a mesh for a Redis that meshes share: a user for each role, and one for all of `penstock up`."""
    from penstock.services.field_problems import SettingsError
    from penstock.services.mesh_file import load_mesh_file
    from penstock.services.private_files import replace_file
    from penstock.services.state.users import acl_lines, shared_rules

    with failing_on(SettingsError, status=2):
        rules = shared_rules(load_mesh_file(mesh).name, read_only_patterns=not redis_6)
    try:
        known = _read(passwords) if passwords.exists() else {}
        if missing := [user for user in rules if user not in known]:
            known |= {user: secrets.token_urlsafe(24) for user in missing}
            replace_file(passwords, json.dumps(known, indent=2) + "\n")
    except (OSError, ValueError) as error:
        fail(f"--passwords: {passwords}: {error}", 2)
    typer.echo(acl_lines(rules, known), nl=False)
    print_line(f"passwords: {passwords}", to=errors)


def _read(path: Path) -> dict[str, str]:
    """Raises:
    ValueError: It is no JSON object of texts.
    """
    known = json.loads(path.read_text())
    if not isinstance(known, dict) or not all(isinstance(each, str) and each for each in known.values()):
        raise ValueError("must be a JSON object of passwords by user")
    return known
