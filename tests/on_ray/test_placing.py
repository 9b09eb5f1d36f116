"""What should run, what it asks of Ray, and what `up --on` refuses. Needs no Ray."""

import importlib.util
import stat
from pathlib import Path
from typing import Any

import pytest

from penstock.on_ray.mesh import RayMesh
from penstock.on_ray.resources import actor_options, bundles
from penstock.on_ray.shared import Shared
from penstock.on_ray.supervisor import placed_spec, write_files
from penstock.placement.mesh_input import MeshInput, MeshOptions
from penstock.placement.processes import (
    MeshProcess,
    mesh_processes,
    missing_workers,
    process_named,
    surplus_workers,
    worker_counts,
)
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_file import load_mesh_file
from penstock.types.plans import Plan, TierPlan
from tests.conftest import write_mesh_file
from tests.support.cli import penstock

LARGE: dict[str, Any] = {
    "name": "large", "model": "Qwen/Qwen3-32B", "engine": "sglang", "device": "cuda", "gpu_type": "H100",
    "workers": 2, "threads": 3, "sglang": {"tp": 4},
}  # fmt: skip
SMALL: dict[str, Any] = {"name": "small", "model": "s", "threshold": 50}


def plan_of(**counts: int) -> Plan:
    return Plan(tiers=tuple(TierPlan(name, name, None, count) for name, count in counts.items()))


def test_workers_are_those_of_the_plan(tmp_path: Path) -> None:
    """Free indexes are filled first, and the last started are stopped first; a tier without a plan is the mesh file's."""
    mesh = load_mesh_file(write_mesh_file(tmp_path, [SMALL, LARGE]))
    described = mesh_processes(mesh, 2)
    names = [process.name for process in described]
    assert names == ["planner-0", "worker-small-0", "worker-large-0", "worker-large-1", "judge-0", "router-0"]
    assert worker_counts(mesh, plan_of(small=0)) == {"small": 0, "large": 2}
    counts = worker_counts(mesh, plan_of(small=2, large=4))
    running = [*names, "worker-large-3"]
    assert [p.name for p in missing_workers(mesh, counts, running)] == ["worker-small-1", "worker-large-2"]
    assert surplus_workers(counts, running) == []
    assert surplus_workers({"small": 0, "large": 2}, running) == ["worker-small-0", "worker-large-3"]
    added = process_named("worker-large-3", mesh, described)
    assert (added.env["PENSTOCK_TIER"], added.gpus, added.gpu_type) == ("large", 4, "H100")
    assert process_named("judge-0", mesh, described) is described[4]


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
    with pytest.raises(SettingsError, match=r"--runtime-env: .*env.yaml: must hold a mapping"):
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
