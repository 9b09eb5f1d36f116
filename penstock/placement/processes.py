"""What should run for a mesh file and its plan. No I/O."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.services.domain.hardware import ReplicaShape
from penstock.services.extensions.engines import engine_of, tier_in_shape
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.processes import ProcessSpec

STOP_ORDER = {"router": 1, "worker": 2, "judge": 2, "planner": 3, "redis": 9}
"""By role: lower ones are stopped first."""
STOP_S = 35.0  # a little longer than a service drains


@dataclass(frozen=True, slots=True)
class MeshProcess:
    """A process of a mesh. name: begins with its role. env: variables of its own.

    cpus, gpus: what it needs of a host; gpu_type: of those GPUs, empty for any. nodes: that it is on, with equal parts of
    the GPUs, and as many cores on each; node_counts: what that number may be, ascending.
    """

    name: str
    env: Mapping[str, str]
    cpus: int = 0
    gpus: int = 0
    gpu_type: str = ""
    nodes: int = 1
    node_counts: tuple[int, ...] = (1,)

    @property
    def role(self) -> str:
        return role_of(self.name)


def role_of(name: str) -> str:
    return name.partition("-")[0]


def tier_of(name: str) -> str:
    """The tier of a process named `worker-<tier>-<number>` or `worker-<tier>-<number>@<shape>`; empty for other processes."""
    kind, _, rest = name.partition("@")[0].partition("-")
    return rest.rpartition("-")[0] if kind == "worker" else ""


def mesh_processes(mesh: MeshFile, router_processes: int, *, any_ports: bool = False) -> list[MeshProcess]:
    """The processes that the mesh file describes. router_processes: of each router. any_ports: routers use any free ports."""
    processes = [MeshProcess(f"planner-{i}", {}) for i in range(mesh.planner.replicas)]
    processes += [worker(mesh, tier.name, i) for tier in mesh.tiers for i in range(tier.workers)]
    judge = mesh.judge
    for i in range(judge.replicas):
        processes.append(MeshProcess(f"judge-{i}", {"OMP_NUM_THREADS": str(judge.threads)}, cpus=judge.threads))
    ports = {"GRPC": mesh.router.grpc_port, "HTTP": mesh.router.http_port, "ADMIN": mesh.router.admin_port}
    for i in range(mesh.router.replicas):
        own = {f"PENSTOCK_{k}_PORT": str(port + i if port and not any_ports else 0) for k, port in ports.items()}
        processes.append(MeshProcess(f"router-{i}", own, cpus=router_processes))
    return processes


def worker(mesh: MeshFile, tier_name: str, index: int, shape: ReplicaShape | None = None) -> MeshProcess:
    """A worker of a tier. index: from 0. shape: None: as the mesh file has them."""
    tier = mesh.tier(tier_name)
    shaped, name = tier_in_shape(mesh, tier, shape), f"worker-{tier.name}-{index}"
    env = {"PENSTOCK_TIER": tier.name, "PENSTOCK_WORKER_INDEX": str(index), "OMP_NUM_THREADS": str(tier.threads)}
    if shaped is not tier and shape is not None:
        name, env = f"{name}@{shape.name}", {**env, "PENSTOCK_WORKER_SHAPE": shape.name}
    engine = engine_of(mesh, shaped)
    gpus, gpu_type, counts = engine.gpu_count(shaped), shaped.gpu_type, engine.node_counts(shaped)
    return MeshProcess(name, env, tier.threads, gpus, gpu_type if gpus else "", node_counts=counts if gpus else (1,))


def process_named(name: str, mesh: MeshFile, described: Sequence[MeshProcess]) -> MeshProcess:
    """The process of a name. described: by the mesh file; other names are of workers that a plan has added."""
    known = next((process for process in described if process.name == name), None)
    if known is not None:
        return known
    numbered, _, shape = name.partition("@")
    return worker(mesh, tier_of(name), index_of(numbered), ReplicaShape.named(shape) if shape else None)


def expected_instances(processes: Sequence[MeshProcess], router_processes: int) -> dict[str, int]:
    """Numbers of instances by kind: a role, or `worker <tier>`."""
    kinds = dict.fromkeys(("router", "planner", "judge"), 0)
    for process in processes:
        kind = f"worker {tier_of(process.name)}" if process.role == "worker" else process.role
        kinds[kind] = kinds.get(kind, 0) + (router_processes if process.role == "router" else 1)
    return {kind: count for kind, count in kinds.items() if count}


def index_of(name: str) -> int:
    """The number of a process in its name."""
    return int(name.partition("@")[0].rpartition("-")[2])


def service_spec(process: MeshProcess, environment: Mapping[str, str], log: Path) -> ProcessSpec:
    """How a process is run on a host. environment: of all processes there."""
    argv, env = [sys.executable, "-m", f"penstock.{process.role}_service"], {**environment, **process.env}
    return ProcessSpec(process.name, argv, env, log, STOP_ORDER[process.role], STOP_S)
