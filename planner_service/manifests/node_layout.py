"""Where the replicas of a plan fit on the nodes of its cluster: which GPUs of which node. No I/O.

A pipeline stage is on one node, since its shards exchange activations in every layer. Replicas are placed from the widest
stage to the narrowest, each on the first node with room (first fit decreasing): whole, if a node is as large, else stage by
stage. With stages and nodes of powers of two nothing is left over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.services.domain.hardware import ClusterSpec, ReplicaShape

Replicas = Sequence[tuple[ReplicaShape, int]]
"""Shapes with their counts."""


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """Consecutive GPUs of a node that run one pipeline stage. tier, replica, stage, first_gpu: from 0."""

    tier: int
    replica: int
    shape: ReplicaShape
    stage: int
    first_gpu: int


@dataclass(frozen=True, slots=True)
class Node:
    """A node of one type of GPU. number: from 1, within the type. stages: in the order of their GPUs."""

    type: ClusterSpec
    number: int
    stages: tuple[PlacedStage, ...]


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """nodes: all of the cluster. unplaced: replicas for which no node has enough GPUs left, although the cluster has."""

    nodes: tuple[Node, ...]
    unplaced: int


def node_layout(types: Sequence[ClusterSpec], tiers: Sequence[Replicas]) -> NodeLayout:
    """Place the replicas of all tiers. types: of GPUs, with distinct names; tiers: in the cascade's order."""
    nodes, unplaced = list[Node](), 0
    for cluster in types:
        queue = [
            (tier, replica, shape)
            for tier, replicas in enumerate(tiers)
            for replica, shape in enumerate(shape for shape, count in replicas for _ in range(count))
            if shape.gpu == cluster.name
        ]
        queue.sort(key=lambda each: (-each[2].tp, -each[2].pp, each[0], each[1]))
        placed: list[list[PlacedStage]] = [[] for _ in range(cluster.nodes)]
        for tier, replica, shape in queue:
            chosen = _nodes_for(shape, [cluster.gpus_per_node - sum(s.shape.tp for s in node) for node in placed])
            if chosen is None:
                unplaced += 1
                continue
            for stage, node in enumerate(chosen):
                first = sum(s.shape.tp for s in placed[node])
                placed[node].append(PlacedStage(tier, replica, shape, stage, first))
        nodes += [Node(cluster, number, tuple(stages)) for number, stages in enumerate(placed, 1)]
    return NodeLayout(tuple(nodes), unplaced)


def _nodes_for(shape: ReplicaShape, free: list[int]) -> list[int] | None:
    """The node of each stage of a replica; None if they do not fit. free: GPUs left, by node."""
    whole = next((node for node, gpus in enumerate(free) if gpus >= shape.gpus), None)
    if whole is not None:
        return [whole] * shape.pp
    chosen = list[int]()
    left = list(free)
    for _ in range(shape.pp):
        node = next((node for node, gpus in enumerate(left) if gpus >= shape.tp), None)
        if node is None:
            return None
        left[node] -= shape.tp
        chosen.append(node)
    return chosen
