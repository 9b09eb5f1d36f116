"""Replicas on nodes: each stage on GPUs of one node and of its type, no GPU twice, and the picture of it."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.plan_plots import MOST_ROWS, plot_nodes
from penstock.planner_service.files.hardware import gpu_of_catalogue
from penstock.planner_service.manifests.node_layout import node_layout
from penstock.services.domain.hardware import ClusterSpec, ReplicaShape
from penstock.types.deployments import ReplicaGroup
from penstock.types.planned import PlannedTier

H100, L40S = gpu_of_catalogue("h100"), gpu_of_catalogue("l40s")


def cluster(nodes: int, gpus: int, name: str = "") -> ClusterSpec:
    return ClusterSpec(L40S if name.startswith("l40s") else H100, nodes, gpus, 25e9, name=name)


@pytest.mark.parametrize("seed", range(60))
def test_every_stage_has_gpus_of_its_own_on_one_node(seed: int) -> None:
    """Random plans with shapes of powers of two, up to the last GPU: all are placed, and none overlaps another."""
    rng = random.Random(seed)
    types = (cluster(rng.randint(1, 5), 8, "h100"), cluster(rng.randint(1, 5), 4, "l40s"))
    left = {each.name: each.gpus for each in types}
    tiers: list[list[tuple[ReplicaShape, int]]] = [[], [], []]
    for _ in range(30):
        where = rng.choice(types)
        shape = ReplicaShape(rng.choice([1, 2, 4, 8][: 3 + (where.gpus_per_node == 8)]), rng.choice([1, 2]), where.name)
        count = rng.randint(1, 3)
        if shape.gpus * count <= left[where.name]:
            left[where.name] -= shape.gpus * count
            rng.choice(tiers).append((shape, count))
    layout = node_layout(types, tiers)
    assert layout.unplaced == 0
    assert len(layout.nodes) == sum(each.nodes for each in types)
    stages: Counter[tuple[int, ReplicaShape]] = Counter()
    for node in layout.nodes:
        used = [gpu for s in node.stages for gpu in range(s.first_gpu, s.first_gpu + s.shape.tp)]
        assert len(used) == len(set(used))
        assert all(0 <= gpu < node.type.gpus_per_node for gpu in used)
        assert all(s.shape.gpu == node.type.name for s in node.stages)
        stages.update((s.tier, s.shape) for s in node.stages)
    for tier, replicas in enumerate(tiers):
        for shape in {shape for shape, _ in replicas}:
            assert stages[tier, shape] == shape.pp * sum(count for each, count in replicas if each == shape)


def test_a_replica_stays_on_one_node_if_it_can() -> None:
    layout = node_layout(
        [cluster(2, 8)], [[(ReplicaShape(1, 1), 2)], [(ReplicaShape(2, 2), 1)], [(ReplicaShape(4, 1), 2)]]
    )
    on = {node.number for node in layout.nodes for s in node.stages if s.tier == 1}
    assert len(on) == 1


def test_what_no_node_has_room_for_is_counted() -> None:
    layout = node_layout([cluster(2, 6)], [[(ReplicaShape(4, 1), 3)]])
    assert layout.unplaced == 1
    assert [len(node.stages) for node in layout.nodes] == [1, 1]
    assert node_layout([cluster(2, 6)], [[(ReplicaShape(4, 3), 1)]]).unplaced == 1


Tiers = tuple[tuple[str, list[tuple[ReplicaShape, int]]], ...]


def drawn_plan(types: list[ClusterSpec], tiers: Tiers, folder: Path) -> tuple[list[Path], str]:
    """(the files, the text of the picture) of a plan's replicas on its nodes."""
    gpus = sum(shape.gpus * count for _, replicas in tiers for shape, count in replicas)
    groups = [tuple(ReplicaGroup(count=n, tp=s.tp, pp=s.pp, gpu=s.gpu) for s, n in replicas) for _, replicas in tiers]
    planned = [PlannedTier(name, "m", 0, each) for (name, _), each in zip(tiers, groups, strict=True)]
    plan: Any = SimpleNamespace(tiers=planned, gpus=gpus)
    layout = node_layout(types, [replicas for _, replicas in tiers])
    return plot_nodes(layout, plan, folder / "plan.json"), (folder / "plan-nodes.svg").read_text()


def test_the_picture_names_every_replica_and_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small clusters have a row for each node; of large ones, neighbours that run the same share one."""
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")  # text as text
    one = ReplicaShape(1, 1, "l40s-spot")
    tiers: Tiers = (("small", [(one, 5)]), ("large", [(ReplicaShape(4, 2, "h100"), 1)]))
    written, drawn = drawn_plan([cluster(2, 8, "h100"), cluster(2, 4, "l40s-spot")], tiers, tmp_path)
    assert sorted(path.name for path in written) == ["plan-nodes.png", "plan-nodes.svg"]
    for text in (
        "small 1",
        "small 5",
        "large 1, stage 2/2",
        "h100 node 2",
        "l40s-spot node 1",
        "13 of 24 GPUs",
        "idle",
    ):
        assert text in drawn
    many: Tiers = (("large", [(ReplicaShape(8, 2), MOST_ROWS)]),)
    _, drawn = drawn_plan([cluster(4 * MOST_ROWS, 8)], many, tmp_path)
    assert f"h100 nodes 1 to {2 * MOST_ROWS}" in drawn
    assert f"h100 nodes {2 * MOST_ROWS + 1} to {4 * MOST_ROWS}" in drawn
    assert "stage" not in drawn
