"""Clusters of several types of GPU: the cheapest against brute force, the fastest, files, the plan from end to end."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.brute_force import instance, kinds, wanted_quality
from penstock.planner_service.deployment import mixed
from penstock.planner_service.deployment.mixed import GpuTypes
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.files.site import site_of as question_site
from penstock.planner_service.question.site import Demand, Site, replica_kinds
from penstock.planner_service.routing.goals import cheapest, least_latency
from penstock.planner_service.routing.mixed_deployer import TOLERANCE, MixedDeployer
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import Dispatch, EngineLimits, Replica, Workload
from penstock.planner_service.simulator.tier import serve
from penstock.question_files.errors import FileError
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ReplicaShape
from penstock.types.planning import Cascade, CascadeTier, Cluster, Gpu, GpuType, Model, Objective
from tests.support.inputs import read_site
from tests.support.plain_plans import plan_cascade

TYPES = ("fast", "spot")
Priced = tuple[tuple[int, ...], float, float]  # GPUs of each type, cost, latency


def typed_kinds(speed: float, slower: float) -> list[Replica]:
    """The kinds of brute_force on two types of GPU, the second of which takes `slower` times as long.

    A replica runs one request at a time, so that requests queue and a second replica of either type is worth having.
    """
    return [
        dataclasses.replace(kind, shape=dataclasses.replace(kind.shape, gpu=name), limits=EngineLimits(1, 256, 16))
        for name, factor in zip(TYPES, (1.0, slower), strict=True)
        for kind in kinds(speed * factor)
    ]


def typed_instance(seed: int) -> tuple[MixedDeployer, JudgedSample]:
    """As brute_force.instance, on two or three GPUs of each of two types with prices."""
    plain, sample = instance(seed, tiers=2 + seed % 2, count=5 + seed % 4, gpus=4)
    rng = np.random.default_rng(seed + 10_000)
    prices = (float(rng.uniform(2, 6)), float(rng.uniform(0.5, 4)))
    counts = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
    types = GpuTypes(TYPES, counts, prices, sum(counts) - int(rng.integers(0, 2)))
    speeds = (0.5, 1.0, 3.0)[-len(sample.tiers) :]
    typed = [typed_kinds(speed, float(rng.uniform(1.1, 3))) for speed in speeds]
    arrivals = plain._traffic.arrival_s * float(
        rng.choice([1.0, 0.1])
    )  # at once, queues make more GPUs of either type worth it
    return MixedDeployer(sample, arrivals, typed, types), sample


def priced(work: Workload, replicas: Sequence[Replica], types: GpuTypes) -> list[Priced]:
    """Every multiset of replicas that fits, simulated."""
    if not len(work):
        return [((0,) * len(types.names), 0.0, 0.0)]
    found: list[Priced] = []
    most = [types.gpus[types.names.index(kind.shape.gpu)] // kind.shape.gpus for kind in replicas]
    for counts in itertools.product(*(range(n + 1) for n in most)):
        strategy = Strategy(tuple((kind, n) for kind, n in zip(replicas, counts, strict=True) if n), 0.0)
        taken = types.of(strategy)
        if not strategy.replicas or any(n > have for n, have in zip(taken, types.gpus, strict=True)):
            continue
        each = [kind for kind, n in strategy.replicas for _ in range(n)]
        served = serve(work, each, Dispatch.CAPACITY)
        found.append((taken, types.price(taken), float(np.percentile(served.finish_s - work.arrival_s, 95))))
    # of those on the same GPUs only the fastest can matter
    return [one for one in found if one[2] == min(other[2] for other in found if other[0] == one[0])]


def brute_force(
    deployer: MixedDeployer,
    sample: JudgedSample,
    min_quality: float,
    limit_s: float,
    served_elsewhere: Callable[[Workload], list[Priced]] | None = None,
) -> tuple[float, float]:
    """(the least cost within the limit, the least latency of the slowest tier), infinite where there is none.

    served_elsewhere: what the last tier's requests cost and take, where it is not served by replicas.
    """
    types, cost, latency, last = deployer.types, np.inf, np.inf, len(sample.tiers) - 1
    known: dict[tuple[int, bytes], list[Priced]] = {}
    for thresholds in itertools.product(*(sample.levels(tier) for tier in range(last))):
        routed = route(sample, thresholds)
        if routed.quality < min_quality - 1e-9:
            continue
        tiers = []
        for tier, chosen in enumerate(routed.processed):
            key = (tier, chosen.tobytes())
            if key not in known:
                work = deployer.workload(tier, chosen)
                elsewhere = served_elsewhere if tier == last else None
                known[key] = elsewhere(work) if elsewhere else priced(work, deployer.kinds[tier], types)
            tiers.append(known[key])
        for fitting in itertools.product(*tiers):
            own_cost, seconds = sum(one[1] for one in fitting), max(one[2] for one in fitting)
            if own_cost >= cost and seconds >= latency:
                continue
            taken = [sum(one[0][p] for one in fitting) for p in range(len(types.names))]
            if any(n > have for n, have in zip(taken, types.gpus, strict=True)) or sum(taken) > types.most:
                continue
            latency = min(latency, seconds)
            if seconds <= limit_s:
                cost = min(cost, own_cost)
    return float(cost), float(latency)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_the_cheapest_cluster_of_two_types_is_brute_forces(part: int) -> None:
    """200 seeded instances: the least cost of all thresholds and of all replicas of either type, mixed or not."""
    met = mixed_tiers = 0
    for seed in range(part * 50, part * 50 + 50):
        deployer, sample = typed_instance(seed)
        wanted, limit = wanted_quality(sample), float(np.random.default_rng(seed).uniform(0.5, 8.0))
        cost, _ = brute_force(deployer, sample, wanted, limit)
        if cost == np.inf:
            with pytest.raises(Unreachable):
                cheapest(deployer, wanted, limit)
            continue
        plan = cheapest(deployer, wanted, limit)
        assert deployer.cost(plan.deployment) == pytest.approx(cost), seed
        assert plan.deployment.latency_s <= limit
        assert plan.quality >= wanted - 1e-9
        taken = [deployer.types.of(strategy) for strategy in plan.deployment.strategies]
        assert all(sum(one[p] for one in taken) <= deployer.types.gpus[p] for p in range(2))
        assert sum(map(sum, taken)) <= deployer.types.most
        met += 1
        mixed_tiers += any(all(one) for one in taken)
    assert met >= 15
    assert mixed_tiers >= 1


@pytest.mark.slow
def test_the_fastest_deployment_of_two_types_is_brute_forces() -> None:
    """To the tolerance that the plan states as its gap."""
    for seed in range(12):
        deployer, sample = typed_instance(seed)
        wanted = wanted_quality(sample)
        _, latency = brute_force(deployer, sample, wanted, 0.0)
        if latency == np.inf:
            with pytest.raises(Unreachable):
                least_latency(deployer, wanted)
            continue
        plan = least_latency(deployer, wanted)
        assert latency - 1e-9 <= plan.deployment.latency_s <= latency * (1 + TOLERANCE) + 1e-9, seed
        assert plan.gap == TOLERANCE


@pytest.mark.slow
def test_of_many_replicas_the_promising_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all multisets are candidates: a plan that may cost more, never one that is too slow or does not fit."""
    monkeypatch.setattr(mixed, "EVERY", 0)
    same = 0
    for seed in range(20):
        deployer, sample = typed_instance(seed)
        wanted, limit = wanted_quality(sample), float(np.random.default_rng(seed).uniform(0.5, 8.0))
        cost, _ = brute_force(deployer, sample, wanted, limit)
        if cost == np.inf:
            continue
        try:
            plan = cheapest(deployer, wanted, limit)
        except Unreachable:
            continue
        assert plan.deployment.latency_s <= limit
        assert deployer.cost(plan.deployment) >= cost - 1e-9
        same += deployer.cost(plan.deployment) == pytest.approx(cost)
    assert same >= 8


CLUSTER = """
types:
  - { gpu: h100, nodes: 1, gpus_per_node: 8, dollars_per_gpu_hour: 4 }
  - { name: h100-spot, gpu: h100, nodes: 1, gpus_per_node: 4, dollars_per_gpu_hour: 1.5 }
"""
MODELS = "tiers: [{ name: small, model: llama-3.1-8b }, { name: large, model: llama-3.1-70b }]"


def typed_site(folder: Path, cluster: str = CLUSTER, models: str = MODELS) -> Site:
    (folder / "cluster.yaml").write_text(cluster)
    (folder / "models.yaml").write_text(models)
    return read_site(folder / "cluster.yaml", folder / "models.yaml")


def test_a_cluster_file_has_types_with_prices(tmp_path: Path) -> None:
    site = typed_site(tmp_path)
    assert [each.name for each in site.types] == ["h100", "h100-spot"]
    assert site.gpus == 12
    parts = ((ReplicaShape(2, 1, "h100"), 1), (ReplicaShape(4, 1, "h100-spot"), 1))
    assert site.dollars_per_hour(parts) == 2 * 4 + 4 * 1.5
    shapes = {replica.shape for replica in replica_kinds(site, 0, 12, 1000)[0]}
    assert ReplicaShape(8, 1, "h100") in shapes
    assert ReplicaShape(4, 1, "h100-spot") in shapes
    assert ReplicaShape(8, 1, "h100-spot") not in shapes  # a node has four
    replica, reason = site.replica(0, ReplicaShape(1, 1, "l4"), 1000)
    assert replica is None
    assert "no GPUs of type 'l4': h100, h100-spot" in reason


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("h100-spot, gpu: h100", "h100-spot, gpu: h900", "types[1].gpu: no 'h900' in the catalogue"),
        ("name: h100-spot, ", "", "types[1].name: 'h100' is the name of types[0]"),
        ("nodes: 1, gpus_per_node: 4, dollars_per_gpu_hour: 1.5", "nodes: 1, gpus_per_node: 4", "types[1].dollars_per"),
        ("nodes: 1, gpus_per_node: 4", "nodes: 0, gpus_per_node: 4", "types[1].nodes: "),
        ("dollars_per_gpu_hour: 1.5", "dollars_per_gpu_hour: -1", "types[1].dollars_per_gpu_hour: "),
        ("h100-spot", "H100 spot", "types[1].name: "),
        ("types:", "nodes: 2\ntypes:", "nodes: "),
    ],
)
def test_faults_of_a_cluster_file_name_the_field(tmp_path: Path, before: str, after: str, message: str) -> None:
    with pytest.raises((FileError, InvalidRequest), match=re.escape(message)):
        typed_site(tmp_path, CLUSTER.replace(before, after))


@pytest.mark.slow
def test_a_plan_of_two_types_is_within_the_latency_and_costs_what_it_says(tmp_path: Path) -> None:
    site = typed_site(tmp_path)
    rng = np.random.default_rng(5)
    scores = np.column_stack([rng.uniform(20, 90, 80), np.full(80, 90.0)])
    judged = JudgedSample(site.tiers, rng.integers(50, 400, 80), rng.integers(20, 200, (80, 2)), scores)
    demand = Demand(judged, judged, np.cumsum(rng.exponential(0.2, 80)))
    targets: dict[str, Any] = {"min_quality": 75.0, "max_latency_s": 12.0, "max_utilisation": 0.75}
    plan = plan_cascade(site, demand, objective=Objective.END_TO_END, **targets)
    parts = [(replica.shape, count) for tier in plan.tiers for replica, count in tier.strategy.replicas]
    assert plan.end_to_end_p95_s <= 12
    assert plan.dollars_per_hour == pytest.approx(
        sum({"h100": 4, "h100-spot": 1.5}[s.gpu] * s.gpus * n for s, n in parts)
    )
    spot = typed_site(tmp_path, CLUSTER.replace("1.5", "9"))  # at another price, the other type
    dear = plan_cascade(spot, demand, objective=Objective.END_TO_END, **targets)
    assert {replica.shape.gpu for tier in dear.tiers for replica, _ in tier.strategy.replicas} == {"h100"}
    assert "h100-spot" in {shape.gpu for shape, _ in parts}


def test_types_of_gpu_come_by_rpc_as_in_files(tmp_path: Path) -> None:
    cascade = Cascade((CascadeTier("small", Model("llama-3.1-8b")), CascadeTier("large", Model("llama-3.1-70b"))))
    h100, spot = GpuType(Gpu("h100"), 1, 8, 25.0, 4.0), GpuType(Gpu("h100"), 1, 4, 25.0, 1.5, "h100-spot")
    assert question_site(Cluster((h100, spot)), cascade) == typed_site(tmp_path)
    unknown, unnamed = dataclasses.replace(spot, gpu=Gpu("h900")), dataclasses.replace(spot, name="")
    for types, field in (
        ((h100, unknown), "cluster.types[1].gpu"),
        ((h100, unnamed), "cluster.types[1].name"),
        ((GpuType(Gpu(), 1, 1),), "cluster.types[0].gpu"),
        ((), "cluster.types"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            question_site(Cluster(types), cascade)
        assert caught.value.problems[0].field == field
