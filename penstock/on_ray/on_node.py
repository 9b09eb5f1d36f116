"""What a process of a mesh needs on its node: its files, and how it is run there."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from penstock.local import redis_server
from penstock.on_ray import shared as shared_state
from penstock.on_ray.shared import Shared
from penstock.placement.processes import MeshProcess, service_spec
from penstock.services.private_files import replace_file
from penstock.services.processes import ProcessSpec, free_port


def log_file(mesh: str, name: str) -> Path:
    """The log of a process, where Ray has those of the node."""
    from ray._private.worker import global_worker

    return Path(global_worker.node.get_logs_dir_path()) / f"penstock-{mesh}-{name}.log"


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


def prepared_spec(mesh: str, process: MeshProcess, name: str) -> ProcessSpec:
    """How a process is run on this node, with its files written. name: of its folder and its log."""
    shared = shared_state.load(mesh)
    assert shared is not None
    folder, log, host = own_folder(mesh, name), log_file(mesh, name), node_address()
    write_files(folder, process.role, shared)
    if process.role == "redis":
        return redis_spec(mesh, shared, host, log)
    return placed_spec(process, shared, host, folder, log)


def node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def placed_spec(process: MeshProcess, shared: Shared, host: str, folder: Path, log: Path) -> ProcessSpec:
    """A service, at the address of its node. Ray has given it its GPUs: they are the only ones it sees."""
    files = shared.files_of(process.role)
    own = {
        "PENSTOCK_MESH_FILE": str(folder / "mesh.yaml"),
        "PENSTOCK_MESH_FOLDER": shared.folder or str(Path.cwd()),
        "PENSTOCK_REDIS_URL": shared.redis_url_of(process.role),
        **dict.fromkeys(("PENSTOCK_BIND_HOST", "PENSTOCK_ADMIN_HOST", "PENSTOCK_ADVERTISE_HOST"), host),
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
