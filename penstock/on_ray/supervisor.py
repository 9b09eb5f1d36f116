"""The actor that runs one process of a mesh on a node of Ray's choice. The process ends with it."""

import asyncio
import logging
import os
import socket
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.local import redis_server
from penstock.on_ray import shared as shared_state
from penstock.on_ray.shared import NAMESPACE, Shared, controller_name
from penstock.placement.processes import MeshProcess, service_spec
from penstock.services.background import supervise
from penstock.services.private_files import replace_file
from penstock.services.processes import ProcessSpec, Watched, Watcher, free_port

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process of a mesh on Ray. pid: None while it is down. host: the name of its node's host. log_tail: its last lines."""

    name: str
    host: str
    pid: int | None
    restarts: int
    log_tail: str


class Supervisor:
    """Keeps one process running, and starts it again with a delay, also where its settings were bad: a port that the one
    before it still drains is free later. What ends is reported to the controller."""

    async def __init__(self, mesh: str, process: MeshProcess) -> None:  # type: ignore[misc]  # as Ray calls it
        import ray
        from ray._private.worker import global_worker

        self._mesh, self._name = mesh, process.name
        self._reports = set[asyncio.Task[None]]()
        self._watcher = Watcher(self._ended, final=())
        shared = shared_state.load(mesh)
        assert shared is not None
        host, log = ray.util.get_node_ip_address(), Path(global_worker.node.get_logs_dir_path())
        self._folder = own_folder(mesh, process.name)
        write_files(self._folder, process.role, shared)
        log /= f"penstock-{mesh}-{process.name}.log"
        if process.role == "redis":
            spec = redis_spec(mesh, shared, host, log)
        else:
            spec = placed_spec(process, shared, host, self._folder, log)
        self._entry = await self._watcher.start(spec)
        self._rotation = supervise("rotate-logs", self._watcher.rotate_logs)

    async def state(self) -> ProcessState:
        entry = self._entry
        return ProcessState(self._name, socket.gethostname(), entry.pid, entry.restarts, entry.log_tail())

    async def renew_files(self) -> None:
        """Write certificates and keys again: services notice new ones."""
        shared = shared_state.load(self._mesh)
        if shared is not None:
            write_files(self._folder, self._name.partition("-")[0], shared)

    async def stop(self) -> None:
        """Let the process finish its requests and end."""
        await self._watcher.stop_all()

    def _ended(self, entry: Watched) -> None:
        report = asyncio.create_task(self._report(f"{self._name} ended with status {entry.status}", entry.log_tail()))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _report(self, what: str, log_tail: str) -> None:
        import ray

        try:
            controller = ray.get_actor(controller_name(self._mesh), namespace=NAMESPACE)
            await controller.ended.remote(what, log_tail)
        except (ValueError, ray.exceptions.RayError) as error:  # it is being restarted: it waits for no report then
            _log.warning("%s; the controller was not told: %s", what, error)


def own_folder(mesh: str, name: str) -> Path:
    """A folder of this user alone for the files of a process."""
    base = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    folder = base / mesh / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_uid != os.getuid():
        raise PermissionError(f"{base} belongs to another user")
    base.chmod(0o700)
    return folder


def write_files(folder: Path, role: str, shared: Shared) -> None:
    """Write the mesh file and the other files of a role."""
    for name, text in {"mesh.yaml": shared.mesh_text, **shared.files_of(role)}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        replace_file(path, text)  # a service may be reading


def placed_spec(process: MeshProcess, shared: Shared, host: str, folder: Path, log: Path) -> ProcessSpec:
    """A service, at the address of its node. Ray has given it its GPUs: they are the only ones it sees."""
    files = shared.files_of(process.role)
    own = {
        "PENSTOCK_MESH_FILE": str(folder / "mesh.yaml"),
        "PENSTOCK_MESH_FOLDER": shared.folder or str(Path.cwd()),
        "PENSTOCK_REDIS_URL": shared.redis_url_of(process.role),
        "PENSTOCK_BIND_HOST": host,
        "PENSTOCK_ADMIN_HOST": host,
        "PENSTOCK_ADVERTISE_HOST": host,
        "PENSTOCK_TLS_FOLDER": str(folder / "tls") if "tls/ca.pem" in files else "",
        "PENSTOCK_KEYS_FILE": str(folder / "keys") if "keys" in files else "",
    }
    index = {"PENSTOCK_WORKER_INDEX": "0"} if process.role == "worker" else {}
    placed = replace(process, env={**process.env, **index})
    return service_spec(placed, {**shared.environment, **own}, log)


def redis_spec(mesh: str, shared: Shared, host: str, log: Path) -> ProcessSpec:
    """The mesh's Redis. Its data stay on the node, and its address the same, also after a restart."""
    if not shared.redis_address:
        shared = replace(shared, redis_address=f"{host}:{free_port()}")
        shared_state.save(mesh, shared)
    address = shared.redis_address
    data, binary = Path.home() / ".penstock" / "ray" / mesh / "redis", redis_server.find()
    redis_server.write_users(data, mesh, binary, shared.redis_passwords)
    return redis_server.spec(data, int(address.rpartition(":")[2]), log, binary, host=host)
