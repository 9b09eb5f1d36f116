"""What the actors of a mesh ask of Ray's scheduler. No I/O."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.placement.processes import MeshProcess

ANY_AMOUNT = 0.001  # of a resource that says what a node is: any number of processes may use it
HEAD_NODE = "node:__internal_head__"


def bundle(process: MeshProcess) -> dict[str, float]:
    """The resources of a process, as Ray's autoscaler counts them."""
    resources: dict[str, float] = {"CPU": process.cpus, "GPU": process.gpus}
    if process.gpu_type:
        resources[process.gpu_type] = ANY_AMOUNT
    if process.role == "redis":
        resources[HEAD_NODE] = ANY_AMOUNT
    return {name: amount for name, amount in resources.items() if amount}


def actor_options(process: MeshProcess) -> dict[str, Any]:
    """The options of a process's supervising actor: spread over nodes, all GPUs of a worker on one node."""
    resources = bundle(process)
    return {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
        "scheduling_strategy": "SPREAD",
    }


def rooms(nodes: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The GPUs of nodes that are alive, by each resource that says what a node is, and of all. nodes: as Ray lists them."""
    gpus = Counter[str]()
    for node in nodes:
        resources: Mapping[str, float] = node["Resources"] if node["Alive"] else {}
        gpus.update({name: resources.get("GPU", 0) for name in {"", *resources} - {"CPU", "GPU", "memory"}})
    return dict(gpus)


def bundles(processes: Iterable[MeshProcess]) -> list[dict[str, float]]:
    """What a mesh needs of the cluster, for the autoscaler: nodes for it are started before processes wait for them."""
    return [resources for process in processes if (resources := bundle(process)) and process.role != "redis"]
