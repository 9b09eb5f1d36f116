"""The actor that holds what should run of a mesh, and follows its plan. Ray starts it again when it or its node dies."""

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.on_ray import shared as shared_state
from penstock.on_ray.shared import Shared
from penstock.placement.mesh import Addresses, MeshFailed, PlacedMesh
from penstock.placement.processes import MeshProcess, mesh_processes, process_named
from penstock.placement.start import Progress
from penstock.services.background import end, supervise
from penstock.services.domain.mesh_view import MeshView
from penstock.services.mesh_file import load_mesh_file
from penstock.services.settings import ServiceSettings
from penstock.services.state.connection import connect
from penstock.services.state.feed import MeshFeed
from penstock.services.state.keys import Keys
from penstock.services.state.users import OPERATOR

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RayMeshState:
    """How a mesh on Ray does. failure: why it could not be started."""

    progress: Progress
    ready: bool
    failure: str
    addresses: Addresses
    redis_url: str


class Controller:
    """Starts the mesh, or continues where the controller before it was."""

    async def __init__(self, mesh: str, shared: Shared) -> None:  # type: ignore[misc]  # as Ray calls it
        from penstock.on_ray.on_node import own_folder, write_files
        from penstock.on_ray.placer import RayPlacer

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        stored = shared_state.load(mesh)
        if stored is None or (stored.stopping and stored.run != shared.run):
            shared_state.save(mesh, shared)
            stored = shared
        self._name, self._shared = mesh, stored
        folder = own_folder(mesh, "controller")
        write_files(folder, "controller", self._shared)
        self._mesh = load_mesh_file(folder / "mesh.yaml")
        processes = self._shared.environment.get("PENSTOCK_ROUTER_PROCESSES") or None
        settings = ServiceSettings.load(mesh_file=Path(folder / "mesh.yaml"), router_processes=processes)
        router_processes = settings.processes_of_router(self._mesh)
        self._view = MeshView()
        self._placer = RayPlacer(mesh, dict(self._shared.runtime_env))
        described = mesh_processes(self._mesh, router_processes)
        for name in self._placer.found():
            if name != "redis":
                await self._placer.start(process_named(name, self._mesh, described))
        self._placed = PlacedMesh(self._mesh, described, self._placer, self._view, router_processes)
        self._failure = ""
        self._run = supervise("follow-plan", self._keep, endless=False)

    async def _keep(self) -> None:
        if self._shared.stopping:
            return
        async with AsyncExitStack() as stack:
            if not self._shared.redis_url:
                await self._placer.start(MeshProcess("redis", {}))
                await self._placer.address_of_redis()
                self._shared = shared_state.load(self._name) or self._shared
            client = connect(self._shared.redis_url_of(OPERATOR))
            stack.push_async_callback(client.aclose)
            feed = MeshFeed(client, Keys(self._mesh.name), self._view, on_change=lambda: self._placed.changed.set())
            await stack.enter_async_context(feed)
            await feed.synced.wait()
            if not self._shared.started:
                await self._placed.start()
                try:
                    await self._placed.until_ready(self._shared.start_timeout_s, lambda _: None)
                except MeshFailed as error:
                    self._failure = str(error)
                    return
                self._share(started=True)
            await self._placed.start(workers=False)  # what the controller before this one did not come to
            await self._placed.follow()

    async def state(self) -> RayMeshState:
        return RayMeshState(
            self._placed.progress(),
            self._shared.started,
            "the mesh is being stopped" if self._shared.stopping else self._failure,
            Addresses.of(self._view),
            self._shared.redis_url_of(OPERATOR) if self._shared.redis_url or self._shared.redis_address else "",
        )

    async def mesh_text(self) -> str:
        """The mesh file that runs."""
        return self._shared.mesh_text

    async def renew_files(self, files: Mapping[str, str]) -> None:
        """Deliver new certificates and keys."""
        self._share(files=dict(files))
        await self._placer.renew_files()

    async def ended(self, what: str, log_tail: str) -> None:
        """A supervising actor says that its process ended by itself."""
        self._placer.ended(what, log_tail)

    async def stop(self) -> None:
        """Stop all processes, each after its running requests. The caller ends this actor then, and removes what is shared:
        until then, a controller that Ray starts again stays stopped."""
        self._share(stopping=True)
        await end(self._run)
        await self._placer.stop_all()

    def _share(self, **changes: Any) -> None:
        self._shared = replace(self._shared, **changes)
        shared_state.save(self._name, self._shared)
