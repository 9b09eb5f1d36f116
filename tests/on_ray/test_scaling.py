"""Between plans, a mesh on a real Ray cluster has as many workers as the leading planner asks for by live load."""

from pathlib import Path

import pytest

from tests.on_ray.support import client_of, live, mesh_on, three_nodes, until
from tests.support.steady_requests import steady_requests

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STREAMS, PLACES, MOST = 12, 2, 3
PACE = {"overhead_ms": 20.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": 100}


async def test_workers_follow_the_load_up_and_down_and_no_reply_is_lost(tmp_path: Path) -> None:
    """The plan stays as it is."""
    tiers = [
        {
            "name": "small",
            "model": "s",
            "engine": "simulated",
            "simulated": PACE,
            "threshold": 80,
            "max_running": PLACES,
        },
        {"name": "large", "model": "l", "engine": "simulated", "simulated": PACE},
    ]
    parts = {
        "planner": {"max_instances": MOST, "scaling": {"enabled": True, "rise_s": 1, "hold_s": 3}},
        "router": {"grpc_port": 0, "http_port": 0},
    }
    with three_nodes({"num_cpus": 0}) as cluster, mesh_on(cluster, tmp_path, tiers=tiers, **parts):
        async with client_of(tmp_path) as client:
            revision = (await client.status()).plan_revision
            async with steady_requests(client, STREAMS):
                print(f"up after {await until(tmp_path, lambda status: live(status, 'small') == MOST):.1f} s")
            print(f"down after {await until(tmp_path, lambda status: live(status, 'small') == 1):.1f} s")
            assert (await client.status()).plan_revision == revision
