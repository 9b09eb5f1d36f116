"""A mesh on a Ray cluster on this machine: its nodes, its processes and streams that are checked token by token."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from benchmarks.fault_streams import StreamResult, grpc_stream
from penstock import AsyncClient, MeshStatus, UnavailableError
from penstock.local.runfile import RunFile, read_run_file
from tests.conftest import write_mesh_file
from tests.support.cli import penstock, penstock_process
from tests.support.simulated_text import ENDLESS, simulated_texts

STREAMS = 50
TOKENS = 300
SLOW = {"overhead_ms": 40.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}  # 12 s a reply
BRIEF = {"overhead_ms": 5.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": 20}
NODE = {"num_cpus": 8, "object_store_memory": 80 << 20}
BACK_S = 240.0  # Ray takes half a minute to find out that a node is dead; two cores run all three
SERVICES = 7  # planner, judge, two routers, three workers


@contextmanager
def three_nodes(head: dict[str, Any], gpus: int = 0) -> Iterator[Cluster]:
    """A cluster that `--on ray` finds. head: options of the head node. gpus: that the others say they have."""
    # idle workers would take the cores that the mesh needs, and at Ray's nice 15 all else on this machine does
    config = {"prestart_worker_first_driver": False, "worker_niceness": 0}
    cluster = Cluster(
        initialize_head=True, head_node_args=NODE | head | {"include_dashboard": False, "_system_config": config}
    )
    try:
        for _ in range(2):
            cluster.add_node(**NODE, num_gpus=gpus)
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.pop("RAY_ADDRESS", None)


@contextmanager
def mesh_on(cluster: Cluster, folder: Path, **parts: Any) -> Iterator[None]:
    """A mesh that runs from a folder, and that leaves nothing on the cluster. parts: of the mesh file."""
    tiers = [
        {"name": "small", "model": "s", "engine": "simulated", "simulated": BRIEF, "threshold": 50},
        {"name": "large", "model": "l", "engine": "simulated", "simulated": SLOW, "workers": 2},
    ]
    router = {"replicas": 2, "grpc_port": 0, "http_port": 0, "worker_silence_s": 4.0}
    file = write_mesh_file(folder, **({"tiers": tiers, "router": router} | parts))
    os.environ["PENSTOCK_OPEN_ACCESS"] = "true"
    began = time.monotonic()
    up(file, folder)
    print(f"up after {time.monotonic() - began:.1f} s")
    yield
    if read_run_file(folder) is None:  # `up` ended with the head node that it was connected to
        up(file, folder)
    down = penstock_process("down", "--folder", folder)
    assert down.returncode == 0, down.stdout + down.stderr
    assert read_run_file(folder) is None
    deadline = time.monotonic() + BACK_S  # Ray ends actors after it has answered
    while [pid for pid in processes("ray::Supervisor") if parent(pid) in raylets(cluster)]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    del os.environ["PENSTOCK_OPEN_ACCESS"]


def up(file: Path | str, folder: Path, *, on: str = "ray") -> None:
    started = penstock_process("up", "--on", on, "--mesh", file, "--folder", folder, "--detach")
    assert started.returncode == 0, started.stdout + started.stderr


def client_of(folder: Path) -> AsyncClient:
    """A client of the routers where they are now."""
    found = run_file(folder)
    return AsyncClient(found.grpc, admin=found.admin, timeout_s=400)


def run_file(folder: Path) -> RunFile:
    found = read_run_file(folder)
    assert found is not None
    return found


def parent(pid: int) -> int:
    """The parent of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def processes(title: str) -> list[int]:
    """The processes whose command line begins with a title."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cmdline").read_bytes().startswith(title.encode()):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def raylets(cluster: Cluster) -> list[int]:
    nodes = [cluster.head_node, *cluster.worker_nodes]
    return [node.all_processes["raylet"][0].process.pid for node in nodes if "raylet" in node.all_processes]


def live(status: MeshStatus, tier: str) -> int:
    """Workers of a tier that are ready."""
    workers = (i for i in status.instances if i.role == "worker" and i.state == "ready" and i.age_s < 2.5)
    return sum(1 for worker in workers if worker.tier == tier)


async def until(folder: Path, condition: Callable[[MeshStatus], bool], timeout_s: float = BACK_S) -> float:
    """Wait for a status; return how long it took. A router that has moved is found by the run file."""
    began = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                async with client_of(folder) as client:
                    async for status in client.watch_status(0.2):
                        if condition(status):
                            return time.monotonic() - began
            except UnavailableError:
                await asyncio.sleep(0.2)


def plan(folder: Path, *command: object) -> None:
    done = penstock("plan", *command, "--admin", ",".join(run_file(folder).admin))
    assert done.returncode == 0, done.output


def whole(status: MeshStatus) -> bool:
    """Whether just the processes of the mesh file run."""
    ready = [i for i in status.instances if i.state == "ready" and i.age_s < 2.5]
    return status.connected and len(ready) == len(status.instances) == SERVICES and live(status, "large") == 2


async def check_streams_amid(client: AsyncClient, kill: Callable[[], None]) -> None:
    """Stream replies of `large`, kill once each has tokens, and check that none is lost, doubled or wrong."""
    results = [StreamResult(f"tell me {i}") for i in range(STREAMS)]
    expected = simulated_texts(dict.fromkeys([result.prompt for result in results], TOKENS))
    stream = grpc_stream(client, model="large", max_tokens=TOKENS)
    running = [asyncio.create_task(stream(result.prompt, result)) for result in results]
    async with asyncio.timeout(120):
        while not all(result.tokens for result in results):
            await asyncio.sleep(0.01)
    await asyncio.to_thread(kill)
    await asyncio.gather(*running)
    assert [result.error for result in results] == [""] * STREAMS
    assert not any(result.doubled for result in results)
    assert all(result.text == expected[result.prompt] for result in results)
    print(f"{STREAMS} streams, {sum(result.failovers for result in results)} failovers")
