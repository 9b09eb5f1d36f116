"""What should run, what it asks of Ray, and what `up --on` refuses. Needs no Ray."""

import importlib.util
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.on_ray.mesh import RayMesh
from penstock.on_ray.on_node import placed_spec, write_files
from penstock.on_ray.resources import actor_options, bundles, over_nodes, rooms
from penstock.on_ray.shared import Shared
from penstock.placement.mesh_input import MeshInput, MeshOptions
from penstock.placement.processes import (
    MeshProcess,
    mesh_processes,
    process_named,
    worker,
)
from penstock.placement.workers import Workers
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.instances import InstanceRecord, ModelCard, Role
from penstock.services.domain.rolling import Kinds, Roll, next_moves
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_file import load_mesh_file
from penstock.types.deployments import ReplicaGroup
from penstock.types.plans import Plan, TierPlan
from tests.conftest import write_mesh_file
from tests.support.cli import penstock

LARGE: dict[str, Any] = {
    "name": "large", "model": "Qwen/Qwen3-32B", "engine": "sglang", "device": "cuda", "gpu_type": "H100",
    "workers": 2, "threads": 3, "sglang": {"tp": 4},
}  # fmt: skip
CARD = ModelCard("large", "m", "d", "sglang", 1000, 10, 16, 8)
SMALL: dict[str, Any] = {"name": "small", "model": "s", "threshold": 50}


def plan_of(**counts: int) -> Plan:
    return Plan(tiers=tuple(TierPlan(name, name, None, count) for name, count in counts.items()))


def test_workers_are_those_of_the_plan(tmp_path: Path) -> None:
    """Free indexes are filled first, and the last started are stopped first; a tier without a plan is the mesh file's."""
    mesh = load_mesh_file(write_mesh_file(tmp_path, [SMALL, LARGE]))
    described = mesh_processes(mesh, 2)
    names = [process.name for process in described]
    assert names == ["planner-0", "worker-small-0", "worker-large-0", "worker-large-1", "judge-0", "router-0"]
    workers = Workers(mesh, lambda process: process.gpu_type)
    assert {workers.tiers[kind.tier]: n for kind, n in workers.target(plan_of(small=0), {}).items()} == {"large": 2}
    running = [*names, "worker-large-3"]
    more = Roll(workers.running(running), workers.target(plan_of(small=2, large=4), {}), {})
    assert [p.name for p in workers.started(more.missing, running)] == ["worker-small-1", "worker-large-2"]
    assert not more.surplus
    fewer = Roll(workers.running(running), workers.target(plan_of(small=0, large=2), {}), {})
    assert sorted(workers.stopped(fewer.surplus, running)) == ["worker-large-3", "worker-small-0"]
    added = process_named("worker-large-3", mesh, described)
    assert (added.env["PENSTOCK_TIER"], added.gpus, added.gpu_type) == ("large", 4, "H100")
    assert process_named("judge-0", mesh, described) is described[4]


def shaped(count: int, tp: int, pp: int = 1) -> Plan:
    """A plan whose large tier has workers of another shape."""
    return Plan(tiers=(TierPlan("large", "large", None, count, replicas=(ReplicaGroup(tp, pp, count, gpu="H100"),)),))


def test_workers_of_another_shape_have_it_in_their_name_and_gpus_of_their_own(tmp_path: Path) -> None:
    """So a controller that Ray starts again knows them. The next GPUs of a tier are those by a worker's number."""
    mesh = load_mesh_file(write_mesh_file(tmp_path, [SMALL, LARGE]))
    workers, described = Workers(mesh, lambda process: process.gpu_type), mesh_processes(mesh, 1)
    running = [process.name for process in described]
    roll = Roll(workers.running(running), workers.target(shaped(3, 2), {}), {})
    made = [*workers.started(roll.missing, running)]
    assert [process.name for process in made] == [f"worker-large-{i}@tp2pp1-H100" for i in (4, 5, 6)]
    assert {process.gpus for process in made} == {2}
    assert made[0].env["PENSTOCK_WORKER_SHAPE"] == "tp2pp1-H100"
    assert [process_named(process.name, mesh, described) for process in made] == made
    assert workers.running([*running, *(process.name for process in made)]) == roll.running + roll.missing
    wide = Roll(workers.running(running), workers.target(shaped(1, 8, 2), {}), {})
    assert [process.name for process in workers.started(wide.missing, running)] == ["worker-large-1@tp8pp2-H100"]
    own = Roll(workers.running(running), workers.target(shaped(2, 4), {}), {})
    assert own.running == own.target, "a plan that says the mesh file's shape changes nothing"


def test_a_roll_on_full_gpus_goes_worker_by_worker(tmp_path: Path) -> None:
    """Two workers of four GPUs become four of two: one stops, two start, and only when these are ready the other stops."""
    mesh = load_mesh_file(write_mesh_file(tmp_path, [SMALL, LARGE]))
    workers = Workers(mesh, lambda process: process.gpu_type)
    names = ["worker-small-0", "worker-large-0", "worker-large-1"]

    def records() -> list[InstanceRecord]:
        """All that run, ready, with the shapes that they report."""
        return [
            InstanceRecord(name, Role.WORKER, name, 1.0, 1, 9.0, model=replace(CARD, tier=kind, shape=shape))
            for name in names
            for kind, shape in [(name.split("-")[1], name.partition("@")[2])]
        ]

    def move(ready: list[InstanceRecord]) -> list[str]:
        """Do what is next; return it."""
        roll = Roll(workers.running(names), workers.target(shaped(4, 2), {}), {"H100": 8})
        starts, stops = next_moves(roll, workers.ready(ready, roll.running))
        started, stopped = [p.name for p in workers.started(starts, names)], workers.stopped(stops, names)
        names[:] = [name for name in (*names, *started) if name not in stopped]
        return [f"-{name.removeprefix('worker-large-')}" for name in stopped] + [
            f"+{name.removeprefix('worker-large-')}" for name in started
        ]

    new = [f"{i}@tp2pp1-H100" for i in range(4)]
    assert move(records()) == ["-1"]
    assert move(records()) == [f"+{new[2]}", f"+{new[3]}"], "on the GPUs that are free"
    assert move(records()[:2]) == [], "they load"
    assert move(records()) == ["-0"]
    assert move(records()) == [f"+{new[0]}", f"+{new[1]}"]
    assert move(records()) == []
    assert workers.running(names) == Kinds({**workers.target(shaped(4, 2), {})})


def test_gpus_of_ray_are_those_of_nodes_that_live() -> None:
    nodes: list[dict[str, Any]] = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0, "H100": 1.0}},
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 8.0}},
        {"Alive": False, "Resources": {"GPU": 8.0, "H100": 1.0}},
    ]
    assert rooms(nodes) == {"": 12, "H100": 4}


def test_what_processes_ask_of_ray(tmp_path: Path) -> None:
    """All GPUs of a worker on one node of its type; a router's processes a core each; what idles asks for nothing."""
    mesh = load_mesh_file(write_mesh_file(tmp_path, [SMALL, LARGE]))
    by_name = {process.name: process for process in mesh_processes(mesh, 2)}
    large = actor_options(by_name["worker-large-0"])
    assert (large["num_cpus"], large["num_gpus"], large["scheduling_strategy"]) == (3, 4, "SPREAD")
    assert list(large["resources"]) == ["H100"]
    assert actor_options(by_name["router-0"])["num_cpus"] == 2
    assert actor_options(by_name["planner-0"])["num_cpus"] == 0
    assert "node:__internal_head__" in actor_options(MeshProcess("redis", {}))["resources"]
    total = bundles([*by_name.values(), MeshProcess("redis", {})])
    assert sum(each.get("GPU", 0) for each in total) == 8
    assert sum(each.get("CPU", 0) for each in total) == 1 + 2 * 3 + 1 + 2


def test_a_worker_with_more_gpus_than_a_node_is_on_as_few_as_have_them(tmp_path: Path) -> None:
    """In equal parts, of whole stages or of a stage's shards. What cannot be divided, or has no known node, waits whole."""

    def nodes(*gpus: float, kind: str = "H100") -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": each, kind: 1.0}} for each in gpus]

    def chosen(options: dict[str, Any], listed: list[dict[str, Any]]) -> int:
        mesh = load_mesh_file(write_mesh_file(tmp_path, [SMALL, LARGE | {"sglang": options}]))
        return over_nodes(worker(mesh, "large", 0), listed).nodes

    assert chosen({"tp": 8, "pp": 2}, nodes(8, 8)) == 2
    assert chosen({"tp": 8, "pp": 2}, nodes(16, 8)) == 1
    assert chosen({"tp": 16}, nodes(8, 8)) == 2
    assert chosen({"tp": 4, "pp": 3}, nodes(8, 8, 8)) == 3
    assert chosen({"tp": 8, "pp": 2, "dp": 2}, nodes(8, 8, 8, 8)) == 1
    dead = [node | {"Alive": False} for node in nodes(16)]
    assert chosen({"tp": 8, "pp": 2}, [*dead, *nodes(4, 4, 4, 4), *nodes(16, kind="A100")]) == 4
    assert chosen({"tp": 8, "pp": 2}, nodes(16, kind="A100")) == 1
    mesh = load_mesh_file(write_mesh_file(tmp_path, [SMALL, LARGE]))
    spread = over_nodes(worker(mesh, "large", 0, ReplicaShape(8, 2, "H100")), nodes(8, 8))
    assert bundles([spread]) == [{"CPU": 3, "GPU": 8, "H100": 0.001}] * 2
    assert actor_options(spread)["num_gpus"] == 8
    assert over_nodes(worker(mesh, "small", 0), nodes(8)).nodes == 1


def test_files_reach_those_that_need_them_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has its own key alone; whose address is its node's, and whose GPUs are those that Ray shows it."""
    files = {"worker/tls/ca.pem": "ca", "worker/tls/worker.pem": "w", "router/tls/router.pem": "r", "router/keys": "k"}
    shared = Shared("run", "name: m", "/models", {"A": "1"}, files, 60.0, "", {"worker": "secret"}, "10.0.0.1:6379")
    for _ in range(2):
        write_files(tmp_path, "worker", shared)
    written = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}
    assert sorted(written) == ["mesh.yaml", "tls/ca.pem", "tls/worker.pem"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in written.values()} == {0o600}
    process = MeshProcess("worker-large-2", {"PENSTOCK_TIER": "large", "PENSTOCK_WORKER_INDEX": "2"})
    env = placed_spec(process, shared, "10.0.0.7", tmp_path, tmp_path / "log").env
    assert env["PENSTOCK_REDIS_URL"] == "redis://worker:secret@10.0.0.1:6379/0"
    assert {env[f"PENSTOCK_{name}_HOST"] for name in ("BIND", "ADMIN", "ADVERTISE")} == {"10.0.0.7"}
    assert (env["PENSTOCK_TLS_FOLDER"], env["PENSTOCK_KEYS_FILE"]) == (str(tmp_path / "tls"), "")
    assert (env["A"], env["PENSTOCK_MESH_FOLDER"], env["PENSTOCK_WORKER_INDEX"]) == ("1", "/models", "0")


@pytest.mark.parametrize(
    ("tier", "open_access", "problem"),
    [
        ({}, "", "PENSTOCK_OPEN_ACCESS=true"),
        ({"device": "cuda:1"}, "true", "tiers[1].device: cuda:1, but Ray chooses"),
        ({"sglang": {"gpus": [0, 1, 2, 3]}, "workers": 1}, "true", "tiers[1].sglang.gpus: Ray chooses"),
        ({"sglang": {"port": 30000}}, "true", "tiers[1].sglang.port: Ray chooses"),
    ],
)
def test_what_cannot_run_on_several_hosts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: dict[str, Any], open_access: str, problem: str
) -> None:
    monkeypatch.setenv("PENSTOCK_OPEN_ACCESS", open_access)
    file = write_mesh_file(tmp_path, [SMALL, LARGE | tier])
    with pytest.raises(SettingsError) as caught:
        RayMesh("ray", MeshOptions(file, tmp_path))
    assert problem in str(caught.value)


def test_a_runtime_environment_is_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "env.yaml"
    file.write_text("[1]")
    with pytest.raises(SettingsError, match=r"--runtime-env: .*env.yaml: must be fields with their values"):
        MeshOptions(tmp_path / "mesh.yaml", tmp_path, runtime_env=file).ray_runtime_env()


def test_counts_of_the_command_are_those_of_the_mesh_file_that_runs(tmp_path: Path) -> None:
    given = MeshInput.read(MeshOptions(write_mesh_file(tmp_path), tmp_path, {"large": 3}), here=True)
    copy = tmp_path / "copy.yaml"
    copy.write_text(given.text)
    assert [tier.workers for tier in load_mesh_file(copy).tiers] == [1, 3]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--on", "kubernetes"], "the chart places the processes"),
        (["--on", "slurm"], "must be local, ray or ray://HOST:PORT, not 'slurm'"),
        (["--runtime-env", "env.yaml"], "--runtime-env: is for --on ray"),
        (["--on", "ray"], 'pip install "penstock-mesh[ray]"'),
    ],
)
def test_up_names_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], problem: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    up = penstock("up", "--mesh", write_mesh_file(tmp_path), "--folder", tmp_path / "run", *options)
    assert up.returncode == 2
    assert problem in " ".join(up.stderr.split())
