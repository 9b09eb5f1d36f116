"""One SGLang server over two nodes of a real Ray cluster. The nodes say that they have GPUs; it runs on their CPUs."""

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from penstock.local.cpu_time import descendants
from tests.conftest import FAMILY
from tests.on_ray.support import BACK_S, NODE, client_of, live, mesh_on, plan, raylets, three_nodes, until
from tests.support.sglang import CPU_LAUNCH, installed

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not installed(), reason="a real SGLang server: tests/support/sglang_cpu/install.sh installs it"),
]

START_S = 900.0
"""Two cores import SGLang six times: under a minute where nothing else runs."""
LARGE = {
    "name": "large", "model": str(FAMILY / "small"), "engine": "sglang", "device": "cuda",
    "kv_tokens": 4096, "max_step_tokens": 512,
    "sglang": CPU_LAUNCH | {
        "tp": 2,
        "start_timeout_s": START_S,
        "flags": [*CPU_LAUNCH["flags"], "--device", "cpu", "--disable-overlap-schedule"],
        "env": CPU_LAUNCH["env"] | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    },
}  # fmt: skip
SMALL = {"name": "small", "model": "s", "engine": "simulated", "threshold": 50}


@dataclass(frozen=True, slots=True)
class Part:
    """A process of the server. address: where rank 0 awaits the others. raylet: of its node. gpus: that it sees."""

    pid: int
    address: str
    raylet: int
    gpus: str


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with three_nodes({"num_cpus": 0}, gpus=1) as nodes:
        yield nodes


def parts(cluster: Cluster) -> dict[int, Part]:
    """Those that run, by rank."""
    found = {}
    for raylet, pid in [(node, pid) for node in raylets(cluster) for pid in descendants(node)]:
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            variables = dict(line.partition("=")[::2] for line in Path(f"/proc/{pid}/environ").read_text().split("\0"))
        except OSError:
            continue
        if "sglang.launch_server" in argv:
            options = dict(itertools.pairwise(argv))
            assert options["--nnodes"] == "2"
            rank, address = int(options["--node-rank"]), options["--dist-init-addr"]
            found[rank] = Part(pid, address, raylet, variables["CUDA_VISIBLE_DEVICES"])
    return found


async def answer(folder: Path) -> str:
    async with asyncio.timeout(BACK_S), client_of(folder) as client:
        return (await client.generate("hello", model="large", temperature=0, max_tokens=16)).text


@pytest.mark.timeout(4 * START_S)
async def test_a_server_over_two_nodes_starts_again_whole_when_a_part_or_a_node_is_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The other part waits for the lost one forever. A lost node's part moves to the node that has a GPU left."""
    with mesh_on(cluster, tmp_path, tiers=[SMALL, LARGE], router={"grpc_port": 0, "http_port": 0}):
        before, text = parts(cluster), await answer(tmp_path)
        assert set(before) == {0, 1}
        assert len({part.raylet for part in before.values()}) == 2
        assert {part.gpus for part in before.values()} == {"0"}
        assert {part.address.rpartition(":")[0] for part in before.values()} == {cluster.head_node.node_ip_address}
        assert len({part.address for part in before.values()}) == 1

        async def started_again(earlier: dict[int, Part]) -> dict[int, Part]:
            """Wait until both parts are new ones, and answer."""
            async with asyncio.timeout(START_S):
                while set(now := parts(cluster)) != {0, 1} or {p.pid for p in now.values()} & {
                    p.pid for p in earlier.values()
                }:
                    await asyncio.sleep(0.5)
            await until(tmp_path, lambda status: live(status, "large") == 1, START_S)
            assert await answer(tmp_path) == text
            assert parts(cluster) == now
            assert len({part.address for part in now.values()}) == 1
            assert now[0].address != earlier[0].address
            return now

        os.kill(before[1].pid, signal.SIGKILL)
        again = await started_again(before)
        assert {rank: part.raylet for rank, part in again.items()} == {r: part.raylet for r, part in before.items()}

        nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
        cluster.add_node(**NODE, num_gpus=1)
        lost = again[1].raylet
        for pid in (lost, *descendants(lost)):
            os.kill(pid, signal.SIGKILL)
        nodes[lost].all_processes["raylet"][0].process.wait()
        cluster.worker_nodes.remove(nodes[lost])
        moved = await started_again(again)
        assert moved[1].raylet not in nodes
        plan(tmp_path, "set", "--instances", "large=0")
        await until(tmp_path, lambda status: not any(i.tier == "large" for i in status.instances))
    assert not parts(cluster)
