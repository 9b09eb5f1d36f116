"""Between plans, `penstock up` has as many workers as the leading planner asks for by live load, if the mesh file says so."""

import asyncio
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncClient
from penstock.local import LocalMesh, MeshOptions
from penstock.services.domain.instances import Role
from tests.conftest import FAST, write_mesh_file
from tests.support.steady_requests import steady_requests

STREAMS, PLACES, MOST = 12, 2, 3
WAIT_S = 300.0


@pytest.mark.slow
async def test_a_tier_has_more_workers_while_its_requests_wait_and_no_reply_is_lost(tmp_path: Path) -> None:
    """The plan stays as it is. The planner exports the count, for autoscalers."""
    tiers: list[dict[str, Any]] = [
        {"name": "small", "model": "s", "threshold": 80, "max_running": PLACES},
        {"name": "large", "model": "l"},
    ]
    for tier in tiers:
        tier |= {"engine": "simulated", "simulated": FAST | {"overhead_ms": 10.0, "reply_tokens": 100}}
    planner = {"max_instances": MOST, "scaling": {"enabled": True, "rise_s": 1, "hold_s": 3}}
    async with LocalMesh(MeshOptions(write_mesh_file(tmp_path, tiers, planner=planner), tmp_path)) as mesh:

        def exported() -> dict[str, int]:
            (record,) = mesh.view.instances(Role.PLANNER)
            with urllib.request.urlopen(f"http://{record.metrics_address}/metrics", timeout=60) as response:
                text = response.read().decode()
            return {
                tier: int(float(count))
                for tier, count in re.findall(
                    r'^penstock_desired_replicas.*penstock_tier="(\w+)".* (\S+)$', text, re.MULTILINE
                )
            }

        async def until(small: int) -> None:
            async with asyncio.timeout(WAIT_S):
                while len(mesh.view.workers("small")) != small or len(mesh.watcher.watched) != 4 + small + 1:
                    await asyncio.sleep(0.02)
            assert await asyncio.to_thread(exported) == {"small": small, "large": 1}

        async with AsyncClient(mesh.grpc_addresses, admin=mesh.admin_addresses) as client:
            async with steady_requests(client, STREAMS):
                await until(MOST)
            await until(1)
            assert (await client.status()).plan_revision == 1
