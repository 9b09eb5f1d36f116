"""Starts and stops the processes of a mesh as actors of Ray."""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.on_ray.resources import actor_options, bundle, bundles, over_nodes, rooms
from penstock.on_ray.server_parts import ServerPart, part_name
from penstock.on_ray.shared import DETACHED, NAMESPACE
from penstock.on_ray.supervisor import Supervisor
from penstock.placement.processes import STOP_ORDER, STOP_S, MeshProcess, role_of

_log = logging.getLogger(__name__)

ANSWER_S = 10.0  # for an actor to say how its process does


class RayPlacer:
    """Runs each process under an actor that outlives the controller. The actors' names say what runs."""

    def __init__(self, mesh: str, runtime_env: dict[str, Any]) -> None:
        self._mesh, self._runtime_env = mesh, runtime_env
        self._processes: dict[str, MeshProcess] = {}
        self._actors: dict[str, Any] = {}
        self._parts: dict[str, list[Any]] = {}
        self._groups: dict[str, PlacementGroup | None] = {}
        self._starting = set[asyncio.Task[None]]()
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def names(self) -> Sequence[str]:
        return [name for name in self._actors if name != "redis"]

    def found(self) -> list[str]:
        """The processes that a controller before this one has started."""
        actors = ray.util.list_named_actors(all_namespaces=True)
        names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
        prefix = f"{self._mesh}/"
        own = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        return sorted(name for name in own if "/" not in name)  # not the parts of their servers

    def pool_of(self, process: MeshProcess) -> str:
        return process.gpu_type

    async def rooms(self) -> Mapping[str, float]:
        return rooms(await asyncio.to_thread(ray.nodes))

    async def start(self, process: MeshProcess) -> None:
        """Start a process, or find the actor that runs it already."""
        name = f"{self._mesh}/{process.name}"
        group = self._groups[process.name] = await asyncio.to_thread(_group, name, process)
        if group is not None:
            process = replace(process, nodes=group.bundle_count)
        self._processes[process.name] = process
        request_resources(bundles=bundles(self._processes.values()))

        def actor(kind: type, name: str, rank: int, *arguments: object) -> Any:
            options = actor_options(process)
            if group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, rank)
            actor_class = ray.remote(kind).options(name=name, runtime_env=self._runtime_env, **DETACHED, **options)
            return actor_class.remote(self._mesh, process, *arguments)

        self._actors[process.name] = actor(Supervisor, name, 0)
        self._parts[process.name] = [
            actor(ServerPart, part_name(self._mesh, process.name, rank), rank, rank) for rank in range(1, process.nodes)
        ]
        task = asyncio.create_task(self._watch_start(process.name))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _watch_start(self, name: str) -> None:
        """Report an actor that cannot be made, for example because its node lacks a package."""
        try:
            await self._actors[name].state.remote()
        except RayError as error:
            if name in self._actors:
                self.ended(f"{name} could not be started by Ray", str(error))

    async def stop(self, names: Collection[str]) -> None:
        await asyncio.gather(*(self._stop(name) for name in names))
        request_resources(bundles=bundles(self._processes.values()))

    async def _stop(self, name: str) -> None:
        self._processes.pop(name, None)
        actor = self._actors[name]
        with contextlib.suppress(RayError, TimeoutError):  # it died, and its process with it, or it has no node yet
            async with asyncio.timeout(STOP_S + ANSWER_S):
                await actor.stop.remote()
        for each in (actor, *self._parts.pop(name)):
            ray.kill(each, no_restart=True)
        if (group := self._groups.pop(name)) is not None:
            ray.util.remove_placement_group(group)
        del self._actors[name]

    async def stop_all(self) -> None:
        """Stop all processes in groups by role."""
        for order in sorted(set(STOP_ORDER.values())):
            await self.stop([name for name in self._actors if STOP_ORDER[role_of(name)] == order])

    async def renew_files(self) -> None:
        """Have processes given the certificates and keys that are shared now."""
        await asyncio.gather(*(actor.renew_files.remote() for actor in self._actors.values()), return_exceptions=True)

    async def address_of_redis(self) -> None:
        """Wait until the mesh's Redis was started."""
        await self._actors["redis"].state.remote()

    def ended(self, what: str, log_tail: str) -> None:
        """Note that a process has ended by itself."""
        _log.warning("%s", what)
        if not self._died.done():
            self._died.set_result(f"{what} while the mesh started:\n{log_tail}")

    async def died(self) -> str:
        return await asyncio.shield(self._died)

    async def absent(self, present: Collection[str]) -> str:
        lines = list[str]()
        for name in self.names:
            try:
                async with asyncio.timeout(ANSWER_S):
                    state = await self._actors[name].state.remote()
            except (RayError, TimeoutError):
                lines.append(f"{name}: Ray has no node for it yet, or its actor does not answer")
                continue
            if not any(service.endswith(f"-{state.host}-{state.pid}") for service in present):
                lines.append(f"{name}:\n{state.log_tail}")
        return "\n".join(lines)


def _group(name: str, process: MeshProcess) -> PlacementGroup | None:
    """The GPUs of a worker on several nodes: those that it has already, or on as few nodes as have as many; None: on one."""
    with contextlib.suppress(ValueError):
        return ray.util.get_placement_group(name)
    with contextlib.suppress(ValueError):
        ray.get_actor(name, namespace=NAMESPACE)
        return None
    spread = over_nodes(process, ray.nodes())
    if spread.nodes == 1:
        return None
    return ray.util.placement_group([bundle(spread)] * spread.nodes, strategy="PACK", name=name, lifetime="detached")
