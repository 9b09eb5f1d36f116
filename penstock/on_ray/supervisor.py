"""The actor that runs one process of a mesh on a node of Ray's choice. The process ends with it."""

import asyncio
import logging
import socket
from dataclasses import dataclass

import ray

from penstock.on_ray import shared as shared_state
from penstock.on_ray.on_node import own_folder, prepared_spec, write_files
from penstock.on_ray.server_parts import ServerParts
from penstock.on_ray.shared import NAMESPACE, controller_name
from penstock.placement.processes import MeshProcess, role_of
from penstock.services.background import supervise
from penstock.services.processes import Watched, Watcher

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process of a mesh on Ray. pid: None while it is down. host: the name of its node's host. log_tail: its last lines."""

    host: str
    pid: int | None
    log_tail: str


class Supervisor:
    """Keeps one process running, and starts it again with a delay, also where its settings were bad: a port that the one
    before it still drains is free later. What ends is reported to the controller."""

    async def __init__(self, mesh: str, process: MeshProcess) -> None:  # type: ignore[misc]  # as Ray calls it
        self._mesh, self._name = mesh, process.name
        self._reports = set[asyncio.Task[None]]()
        spec = prepared_spec(mesh, process, process.name)
        self._parts = ServerParts(mesh, process, self._report) if process.nodes > 1 else None
        self._watcher = Watcher(self._ended, final=(), prepare=self._parts.start if self._parts is not None else None)
        self._entry = await self._watcher.start(spec)
        self._rotation = supervise("rotate-logs", self._watcher.rotate_logs)

    async def state(self) -> ProcessState:
        return ProcessState(socket.gethostname(), self._entry.pid, self._entry.log_tail())

    async def renew_files(self) -> None:
        """Write certificates and keys again: services notice new ones."""
        shared = shared_state.load(self._mesh)
        if shared is not None:
            write_files(own_folder(self._mesh, self._name), role_of(self._name), shared)

    async def stop(self) -> None:
        """Let the process finish its requests and end."""
        await self._watcher.stop_all()
        if self._parts is not None:
            await self._parts.stop()

    def _ended(self, entry: Watched) -> None:
        report = asyncio.create_task(self._report(f"{self._name} ended with status {entry.status}", entry.log_tail()))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _report(self, what: str, log_tail: str) -> None:
        try:
            controller = ray.get_actor(controller_name(self._mesh), namespace=NAMESPACE)
            await controller.ended.remote(what, log_tail)
        except (ValueError, ray.exceptions.RayError) as error:  # it is being restarted: it waits for no report then
            _log.warning("%s; the controller was not told: %s", what, error)
