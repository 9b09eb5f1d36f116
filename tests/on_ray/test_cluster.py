"""A mesh on a real Ray cluster of three nodes: up, plans followed, and any one process killed under streams."""

import asyncio
import functools
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from penstock import AsyncClient, MeshStatus
from penstock.local.cpu_time import descendants
from penstock.services.access import authority
from penstock.services.access.api_keys import KeyFile, new_key
from penstock.services.processes import free_port
from tests.conftest import write_mesh_file
from tests.on_ray.support import (
    NODE,
    check_streams_amid,
    client_of,
    live,
    mesh_on,
    parent,
    plan,
    processes,
    raylets,
    run_file,
    three_nodes,
    until,
    up,
    whole,
)
from tests.support.cli import penstock, penstock_process

pytestmark = [pytest.mark.ray, pytest.mark.slow]

READY_S = 60.0  # within which three workers of a plan are to be ready


@functools.cache
def client_port() -> int:
    """Of the server of Ray's clients."""
    return free_port()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with three_nodes({"num_cpus": 0, "ray_client_server_port": client_port()}) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def folder(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a mesh that runs on the cluster."""
    folder = tmp_path_factory.mktemp("ray")
    with mesh_on(cluster, folder):
        yield folder


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[AsyncClient]:
    async with client_of(folder) as made:
        yield made


async def test_a_request_takes_the_cascade_and_status_shows_the_mesh(folder: Path, client: AsyncClient) -> None:
    reply = await client.generate("hello", temperature=0, max_tokens=30)
    assert reply.tier in ("small", "large")
    shown = penstock("status", "--admin", run_file(folder).admin[0], "--json")
    tiers = {tier["name"]: tier["live_instances"] for tier in json.loads(shown.stdout)["tiers"]}
    assert tiers == {"small": 1, "large": 2}


async def test_workers_follow_the_plan_and_its_rollback(folder: Path) -> None:
    plan(folder, "set", "--instances", "large=3")
    took = await until(folder, lambda status: live(status, "large") == 3, READY_S)
    print(f"three workers after {took:.1f} s")
    plan(folder, "rollback")
    await until(folder, lambda status: live(status, "large") == 2)


async def test_workers_of_another_shape_replace_the_old_ones_and_cost_no_token(folder: Path) -> None:
    """The old ones drain while they stream; a rollback restores them."""

    def shapes(status: MeshStatus) -> list[str]:
        return [i.shape for i in status.instances if i.tier == "large" and i.state == "ready"]

    await until(folder, whole)
    async with client_of(folder) as client:
        await check_streams_amid(client, lambda: plan(folder, "set", "--shape", "large=tp2pp1"))
    await until(folder, lambda status: shapes(status) == ["tp2pp1"] * 2)
    plan(folder, "rollback")
    await until(folder, lambda status: shapes(status) == ["tp1pp1"] * 2 and whole(status))


KILLS = ("worker", "supervisor", "controller", "router", "judge", "node", "raylet")


@pytest.mark.parametrize("victim", KILLS)
async def test_a_kill_loses_and_doubles_no_token(victim: str, cluster: Cluster, folder: Path) -> None:
    """SIGKILL; afterwards as many processes run as before, and the plan is followed. A node is lost with all processes."""
    await until(folder, whole)
    async with client_of(folder) as client:
        instances = (await client.status()).instances
        of_role: dict[str, list[int]] = {}
        for instance in instances:
            if instance.tier != "small":
                of_role.setdefault(instance.role, []).append(int(instance.instance_id.rpartition("-")[2]))
        nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
        below = {pid: {*descendants(pid)} for pid in nodes}
        spared = [pid for pid in nodes if not {*of_role["router"]} <= below[pid]]  # a client needs one router
        node = max(spared, key=lambda pid: len(below[pid] & {*of_role["worker"]}))
        pids = {
            "worker": of_role["worker"][:1],
            "supervisor": [parent(of_role["worker"][0])],
            "controller": [pid for pid in processes("ray::Controller") if parent(pid) in raylets(cluster)],
            "router": of_role["router"][:1],
            "judge": of_role["judge"],
            "raylet": [node],
            "node": [node, *below[node]],
        }[victim]

        def kill() -> None:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            if node in pids:  # a child of this process: Ray takes a raylet as alive until it has been waited for
                nodes[node].all_processes["raylet"][0].process.wait()
                cluster.worker_nodes.remove(nodes[node])

        await check_streams_amid(client, kill)
    if node in pids:
        cluster.add_node(**NODE)
    print(f"{victim}: as many as before {await until(folder, whole):.1f} s after the last stream")
    plan(folder, "set", "--instances", "large=3")  # who decides is there, too
    await until(folder, lambda status: live(status, "large") == 3)
    plan(folder, "rollback")
    await until(folder, whole)


async def test_up_finds_the_mesh_that_a_killed_up_has_left(folder: Path) -> None:
    def ids(status: MeshStatus) -> set[str]:
        return {instance.instance_id for instance in status.instances}

    await until(folder, whole)
    killed = run_file(folder)
    os.kill(killed.pid, signal.SIGKILL)
    while killed.process.runs:
        await asyncio.sleep(0.05)
    async with AsyncClient(killed.grpc, admin=killed.admin) as client:
        before = ids(await client.status())
    up(killed.mesh_file, folder)
    async with client_of(folder) as client:
        assert ids(await client.status()) == before
    other = ("up", "--on", "ray", "--mesh", killed.mesh_file, "--folder", folder / "other", "--worker", "large=1")
    assert "with another mesh file runs on this cluster" in " ".join(penstock_process(*other).stderr.split())


def test_certificates_and_keys_reach_the_nodes_from_outside(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ray's client: `up` need not be on a node."""
    access = {"keys": "keys.json", "tenants": [{"name": "acme"}]}
    file = write_mesh_file(tmp_path, access=access, tls={"folder": "certs"})
    stored, key = new_key("acme", time.time())
    KeyFile(tmp_path / "keys.json").add(stored)
    host = cluster.head_node.node_ip_address
    authority.create(tmp_path / "certs", ["localhost", host], days=1)
    monkeypatch.delenv("PENSTOCK_OPEN_ACCESS", raising=False)
    up(file, tmp_path, on=f"ray://{host}:{client_port()}")
    found = run_file(tmp_path)
    monkeypatch.setenv("PENSTOCK_TLS_FOLDER", found.tls_folder)
    refused = penstock("ask", "hello", "--target", found.grpc[0])
    assert "an API key is needed" in refused.stderr
    monkeypatch.setenv("PENSTOCK_API_KEY", key)
    answered = penstock("ask", "hello", "--target", found.grpc[0])
    assert answered.returncode == 0, answered.output
    assert penstock_process("down", "--folder", tmp_path).returncode == 0
