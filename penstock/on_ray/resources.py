"""What the actors of a mesh ask of Ray's scheduler. No I/O."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from penstock.placement.processes import MeshProcess

ANY_AMOUNT = 0.001  # of a resource that says what a node is: any number of processes may use it
HEAD_NODE = "node:__internal_head__"

Nodes = Iterable[Mapping[str, Any]]
"""As Ray lists them."""


def over_nodes(process: MeshProcess, nodes: Nodes) -> MeshProcess:
    """The process, on as few nodes as have its GPUs: on one where none that lives is known to have any."""
    has = [own.get("GPU", 0) for own in _resources(nodes) if process.gpu_type in {"", *own}]
    room = max(has, default=0)
    count = next((count for count in process.node_counts if process.gpus <= count * room), 1)
    return replace(process, nodes=count)


def bundle(process: MeshProcess) -> dict[str, float]:
    """The resources of a process on each of its nodes, as Ray's autoscaler counts them."""
    resources: dict[str, float] = {"CPU": process.cpus, "GPU": process.gpus // process.nodes}
    if process.gpu_type:
        resources[process.gpu_type] = ANY_AMOUNT
    if process.role == "redis":
        resources[HEAD_NODE] = ANY_AMOUNT
    return {name: amount for name, amount in resources.items() if amount}


def actor_options(process: MeshProcess) -> dict[str, Any]:
    """The options of an actor that supervises a process, on one of its nodes. Processes are spread over nodes."""
    resources = bundle(process)
    return {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
        "scheduling_strategy": "SPREAD",
    }


def rooms(nodes: Nodes) -> dict[str, float]:
    """The GPUs of nodes that are alive, by each resource that says what a node is, and of all."""
    gpus = Counter[str]()
    for resources in _resources(nodes):
        gpus.update({name: resources.get("GPU", 0) for name in {"", *resources} - {"CPU", "GPU", "memory"}})
    return dict(gpus)


def bundles(processes: Iterable[MeshProcess]) -> list[dict[str, float]]:
    """What a mesh needs of the cluster, for the autoscaler: nodes for it are started before processes wait for them."""
    placed = (process for process in processes if process.role != "redis" for _ in range(process.nodes))
    return [resources for process in placed if (resources := bundle(process))]


def _resources(nodes: Nodes) -> Iterator[Mapping[str, float]]:
    """Of those that are alive."""
    return (node["Resources"] for node in nodes if node["Alive"])
