"""What should run for a mesh file and its plan. No I/O."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.services.extensions import engine_of
from penstock.services.mesh_schema import MeshFile
from penstock.services.processes import ProcessSpec
from penstock.types.plans import Plan

STOP_ORDER = {"router": 1, "worker": 2, "judge": 2, "planner": 3, "redis": 9}
"""By role: lower ones are stopped first."""
STOP_S = 35.0  # a little longer than a service drains


@dataclass(frozen=True, slots=True)
class MeshProcess:
    """A process of a mesh. name: begins with its role. env: variables of its own.

    cpus, gpus: what it needs of a host; gpu_type: of those GPUs, empty for any.
    """

    name: str
    env: Mapping[str, str]
    cpus: int = 0
    gpus: int = 0
    gpu_type: str = ""

    @property
    def role(self) -> str:
        return role_of(self.name)


def role_of(name: str) -> str:
    return name.partition("-")[0]


def tier_of(name: str) -> str:
    """The tier of a process named `worker-<tier>-<number>`; empty for other processes."""
    kind, _, rest = name.partition("-")
    return rest.rpartition("-")[0] if kind == "worker" else ""


def of_tier(names: Sequence[str], tier: str) -> list[str]:
    """Those of the names that are workers of a tier."""
    return [name for name in names if tier_of(name) == tier]


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


def worker(mesh: MeshFile, tier_name: str, index: int) -> MeshProcess:
    """A worker of a tier. index: from 0."""
    tier = mesh.tier(tier_name)
    env = {"PENSTOCK_TIER": tier.name, "PENSTOCK_WORKER_INDEX": str(index), "OMP_NUM_THREADS": str(tier.threads)}
    gpus = engine_of(mesh, tier).gpu_count(tier)
    return MeshProcess(f"worker-{tier.name}-{index}", env, tier.threads, gpus, tier.gpu_type if gpus else "")


def process_named(name: str, mesh: MeshFile, described: Sequence[MeshProcess]) -> MeshProcess:
    """The process of a name. described: by the mesh file; other names are of workers that a plan has added."""
    known = next((process for process in described if process.name == name), None)
    return known or worker(mesh, tier_of(name), int(name.rpartition("-")[2]))


def worker_counts(mesh: MeshFile, plan: Plan) -> dict[str, int]:
    """The number of workers of each tier: the plan's, or the mesh file's of a tier that the plan does not have."""
    planned = {tier.name: tier.instances for tier in plan.tiers}
    return {tier.name: planned.get(tier.name, tier.workers) for tier in mesh.tiers}


def missing_workers(mesh: MeshFile, counts: Mapping[str, int], running: Sequence[str]) -> list[MeshProcess]:
    """The workers to start, with the lowest free indexes. running: names of processes."""
    missing = []
    for tier, count in counts.items():
        names = set(of_tier(running, tier))
        free = (i for i in itertools.count() if f"worker-{tier}-{i}" not in names)
        missing += [worker(mesh, tier, i) for i in itertools.islice(free, max(0, count - len(names)))]
    return missing


def surplus_workers(counts: Mapping[str, int], running: Sequence[str]) -> list[str]:
    """The workers to stop, the last started ones of each tier. running: names, in the order of their start."""
    return [name for tier, count in counts.items() for name in of_tier(running, tier)[count:]]


def expected_instances(processes: Sequence[MeshProcess], router_processes: int) -> dict[str, int]:
    """Numbers of instances by kind: a role, or `worker <tier>`."""
    kinds = dict.fromkeys(("router", "planner", "judge"), 0)
    for process in processes:
        kind = f"worker {tier_of(process.name)}" if process.role == "worker" else process.role
        kinds[kind] = kinds.get(kind, 0) + (router_processes if process.role == "router" else 1)
    return {kind: count for kind, count in kinds.items() if count}


def service_spec(process: MeshProcess, environment: Mapping[str, str], log: Path) -> ProcessSpec:
    """How a process is run on a host. environment: of all processes there."""
    return ProcessSpec(
        process.name,
        [sys.executable, "-m", f"penstock.{process.role}_service"],
        {**environment, **process.env},
        log,
        stop_order=STOP_ORDER[process.role],
        stop_s=STOP_S,
    )
