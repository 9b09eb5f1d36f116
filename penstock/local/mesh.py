"""A mesh on this machine: Redis and services as supervised processes, in a folder with their logs."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock.client import AsyncClient, PenstockError, Tls
from penstock.local import redis_server
from penstock.local.gpus import tier_gpus
from penstock.placement.mesh import Addresses, MeshFailed, PlacedMesh
from penstock.placement.mesh_input import MeshOptions
from penstock.placement.processes import MeshProcess, mesh_processes, service_spec, tier_of
from penstock.placement.running_mesh import RunningMesh
from penstock.placement.start import Progress
from penstock.services.background import end, supervise
from penstock.services.domain.mesh_view import MeshView
from penstock.services.processes import ProcessSpec, Watched, Watcher, free_port
from penstock.services.state.connection import connect
from penstock.services.state.feed import MeshFeed
from penstock.services.state.keys import Keys
from penstock.services.state.users import OPERATOR

LOOK_S = 0.1
"""Between two looks at what a router sees."""


@dataclass(frozen=True, slots=True)
class LocalPlacer:
    """Runs processes on this machine, as a watcher's children. spec_of: how a process is run.

    gpus: how many each tier may use; its workers take the next ones by their number.
    """

    watcher: Watcher
    spec_of: Callable[[MeshProcess], ProcessSpec]
    gpus: Mapping[str, int]

    @property
    def names(self) -> Sequence[str]:
        return [name for name in self.watcher.watched if name != "redis"]

    def pool_of(self, process: MeshProcess) -> str:
        return tier_of(process.name)

    async def rooms(self) -> Mapping[str, float]:
        return self.gpus

    async def start(self, process: MeshProcess) -> None:
        await self.watcher.start(self.spec_of(process))

    async def stop(self, names: Collection[str]) -> None:
        await asyncio.gather(*(self.watcher.stop(name) for name in names))

    async def died(self) -> str:
        entry = await self.first(lambda watched: watched.died)
        return f"{entry.spec.name} ended with status {entry.status} while the mesh started:\n{entry.log_tail()}"

    async def absent(self, present: Collection[str]) -> str:
        pids = {service.rpartition("-")[2] for service in present}
        absent = [self.watcher.watched[name] for name in self.names]
        return "\n".join(f"{w.spec.name}:\n{w.log_tail()}" for w in absent if str(w.pid) not in pids)

    async def first(self, event: Callable[[Watched], asyncio.Event]) -> Watched:
        """Wait for the first process whose event is set."""
        waits = {asyncio.create_task(event(w).wait()): w for w in self.watcher.watched.values()}
        try:
            finished, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        return waits[finished.pop()]


class LocalMesh(RunningMesh):
    """A mesh that runs as long as the context lasts. Its folder is locked for that time.

    Raises:
        SettingsError: The mesh file or the options are bad.
        NoRedis: There is no redis-server to start.
        FolderInUse: Another mesh runs from the folder.
        MeshFailed: A process failed, or the mesh was not ready in time. All processes have been stopped.
    """

    def __init__(self, options: MeshOptions, on_progress: Callable[[Progress], None] = lambda _: None) -> None:
        super().__init__(options, on_progress, here=True)
        self._mesh_file = options.folder / "placed.yaml" if options.workers else options.mesh_file
        router_processes = self._input.settings.processes_of_router(self.mesh)
        self._first_metrics_port = self._input.settings.metrics_port
        self._metrics_ports: dict[str, int] = {}
        self.watcher, self.view = Watcher(), MeshView()
        self.processes = mesh_processes(self.mesh, router_processes, any_ports=options.any_ports)
        self._placer = LocalPlacer(self.watcher, self.spec_of, tier_gpus(self.mesh))
        self._placed = PlacedMesh(self.mesh, self.processes, self._placer, self.view, router_processes)
        self._redis_urls: dict[str, str] = {}

    async def _start(self) -> None:
        if self._mesh_file != self._options.mesh_file:
            self._mesh_file.write_text(self._input.text)
        self._stack.push_async_callback(self.watcher.stop_all)
        await self._start_redis()
        client = connect(self.redis_url)
        self._stack.push_async_callback(client.aclose)
        await self._stack.enter_async_context(
            MeshFeed(client, Keys(self.mesh.name), self.view, on_change=self._changed)
        )
        await self._placed.start()
        await self._placed.until_ready(self._input.start_timeout_s, self._report)
        await asyncio.gather(*map(self._until_seen, self.addresses.admin))
        self._stack.push_async_callback(end, supervise("rotate-logs", self.watcher.rotate_logs))
        self._stack.push_async_callback(end, supervise("follow-plan", self._placed.follow))

    async def _until_seen(self, admin: str) -> None:
        """Wait until a router sees a worker of each tier. It hears of them by itself, and skips a tier without one."""
        tls = Tls.of_folder(self.tls_folder) if self.tls_folder is not None else None
        if tls is not None and tls.identity is None:
            return  # only an administrator may ask
        limit_s = self._input.start_timeout_s
        try:
            async with asyncio.timeout(limit_s), AsyncClient(admin, admin=admin, tls=tls) as client:
                async for status in client.watch_status(LOOK_S):
                    if status.tiers and all(tier.live_instances or not tier.planned_instances for tier in status.tiers):
                        return
        except PenstockError as error:
            raise MeshFailed(f"the router at {admin} does not tell what it sees: {error}") from error
        except TimeoutError:
            raise MeshFailed(f"the router at {admin} sees no worker of some tier after {limit_s:g} s") from None

    @property
    def addresses(self) -> Addresses:
        return Addresses.of(self.view)

    def redis_url_of(self, role: str) -> str:
        """The URL of the Redis, with the password of a role (`router`, ...) if this mesh has started it."""
        return self._redis_urls.get(role, self.redis_url)

    async def failed(self) -> str:
        """Wait until a process has failed for good; return the reason."""
        entry = await self._placer.first(lambda watched: watched.fatal)
        return f"{entry.spec.name} cannot run:\n{entry.log_tail()}"

    async def _start_redis(self) -> None:
        if configured := await self._input.configured_redis():
            self.redis_url = configured
            return
        port, binary = free_port(), redis_server.find()
        folder = self._options.folder
        passwords = redis_server.write_users(folder / "redis", self.mesh.name, binary)
        await self.watcher.start(redis_server.spec(folder / "redis", port, folder / "logs" / "redis.log", binary))
        self._redis_urls = {
            user: f"redis://{user}:{password}@127.0.0.1:{port}/0" for user, password in passwords.items()
        }
        self.redis_url = self._redis_urls[OPERATOR]

    def spec_of(self, process: MeshProcess) -> ProcessSpec:
        """How a process is run on this machine."""
        own = {
            "PENSTOCK_MESH_FILE": str(self._mesh_file.resolve()),
            "PENSTOCK_MESH_FOLDER": str(self._input.folder),
            "PENSTOCK_REDIS_URL": self.redis_url_of(process.role),
        }
        if first := self._first_metrics_port:  # one port cannot serve the pages of several processes
            port = self._metrics_ports.setdefault(process.name, first + len(self._metrics_ports))
            own["PENSTOCK_METRICS_PORT"] = str(port)
        return service_spec(
            process, self._input.environment | own, self._options.folder / "logs" / f"{process.name}.log"
        )

    def _changed(self) -> None:
        self._placed.changed.set()
        self._update_run_file()
