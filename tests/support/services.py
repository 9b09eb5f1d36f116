"""Services in the event loop of the test, and a real Redis."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import redis

from penstock.services.domain.instances import Role
from penstock.services.mesh_file import load_mesh_file
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.process_slot import ProcessSlot
from penstock.services.runtime import Chassis, Compose, serve
from penstock.services.settings import ServiceSettings

START_TIMEOUT_S = 600.0  # a worker may start a server of its own
DRAIN_S = 5.0
LEASE_S = 30.0


@contextmanager
def redis_server(binary: str, port: int, folder: Path, *options: str) -> Iterator["RedisProcess"]:
    """A real Redis on loopback, as long as the context lasts."""
    server = RedisProcess(binary, port, folder, options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class RedisProcess:
    """A Redis process that a test can kill and restart."""

    def __init__(
        self, binary: str, port: int, folder: Path, options: tuple[str, ...] = (), sentinel: Path | None = None
    ) -> None:
        """sentinel: the configuration of a Sentinel, which this is then."""
        kind = ["--save", ""] if sentinel is None else [str(sentinel), "--sentinel"]
        self._argv = [binary, *kind, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), *options]
        self.url = f"redis://127.0.0.1:{port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it responds."""
        self._process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + START_TIMEOUT_S
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Kill it. Its data is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@asynccontextmanager
async def serving(
    role: Role,
    compose: Compose,
    mesh_file: Path,
    redis_url: str,
    *,
    slot: ProcessSlot | None = None,
    **settings: Any,
) -> AsyncIterator[Chassis]:
    """Run a service in this event loop, registered in the mesh, as long as the context lasts; then drain it.

    slot: runs it as one of several processes of a router.
    settings: of the service. The lease is long unless given: a starved process must not lose it where that is not tested.
    """
    chosen = ServiceSettings.load(
        mesh_file=mesh_file,
        redis_url=redis_url,
        **{"publish_interval_s": 0.05, "pull_interval_s": 0.02, "drain_s": DRAIN_S, "lease_s": LEASE_S, **settings},
    )
    mesh: MeshFile = load_mesh_file(mesh_file)
    started: asyncio.Future[Chassis] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(role, chosen, mesh, compose, ready=started.set_result, stop=stop, slot=slot))
    try:
        waiting: set[asyncio.Future[Any]] = {task, started}
        await asyncio.wait(waiting, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            stop.set()
            await task  # raises the error
            raise TimeoutError(f"{role.value} did not start")
        yield started.result()
    finally:
        stop.set()
        await task
