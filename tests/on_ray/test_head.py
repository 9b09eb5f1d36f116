"""The head of a Ray cluster is killed and started again, with the mesh's Redis and Ray's own store outside of it."""

import os
import signal
from pathlib import Path

import pytest

from penstock.local.cpu_time import descendants
from penstock.local.runfile import read_run_file
from tests.on_ray.support import (
    check_streams_amid,
    client_of,
    live,
    mesh_on,
    plan,
    run_file,
    three_nodes,
    until,
    up,
    whole,
)
from tests.support.services import RedisProcess

pytestmark = [pytest.mark.ray, pytest.mark.slow]


async def test_a_killed_head_costs_no_token_and_decides_again_when_it_is_back(
    own_redis: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its raylet dies with it and all that ran there; the other nodes serve, and follow the plan once the head is back."""
    monkeypatch.setenv("RAY_REDIS_ADDRESS", own_redis.url.removeprefix("redis://").removesuffix("/0"))
    with three_nodes({"num_cpus": 0}) as cluster, mesh_on(cluster, tmp_path, redis_url=own_redis.url):
        await until(tmp_path, whole)
        head, file = cluster.head_node, run_file(tmp_path).mesh_file

        def kill() -> None:
            raylet = head.all_processes["raylet"][0].process
            for pid in (raylet.pid, *descendants(raylet.pid)):
                os.kill(pid, signal.SIGKILL)
            raylet.wait()
            head.kill_gcs_server()

        async with client_of(tmp_path) as client:
            await check_streams_amid(client, kill)
        head.start_gcs_server()
        cluster.add_node(num_cpus=0)
        if read_run_file(tmp_path) is None:
            up(file, tmp_path)
        await until(tmp_path, whole)
        plan(tmp_path, "set", "--instances", "large=3")
        await until(tmp_path, lambda status: live(status, "large") == 3)
