"""A plan whose workers have other shapes is followed under load: new ones start, are ready, then the old ones drain."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncClient
from penstock.local import LocalMesh, MeshOptions
from penstock.services.domain.instances import Role
from tests.conftest import FAST, write_mesh_file
from tests.support.cli import penstock
from tests.support.steady_requests import steady_requests

STREAMS = 12
PACE = FAST | {"overhead_ms": 10.0, "reply_tokens": 100}
"""Of a step: so that replies run while workers are replaced."""
WAIT_S = 300.0

Shapes = dict[str, Counter[str]]


@pytest.mark.slow
async def test_workers_of_other_shapes_replace_the_old_ones_and_no_reply_is_lost(tmp_path: Path) -> None:
    """`plan set --shape` says the steps; a rollback restores. At no time does a tier serve with fewer workers than before."""
    tiers: list[dict[str, Any]] = [
        {"name": "small", "model": "s", "threshold": 80, "engine": "simulated", "simulated": PACE},
        {"name": "large", "model": "l", "engine": "simulated", "simulated": PACE, "workers": 2},
    ]
    async with LocalMesh(MeshOptions(write_mesh_file(tmp_path, tiers), tmp_path)) as mesh:
        least = {"small": 1, "large": 2}
        own, other = (
            {"small": Counter({"tp1pp1": 1}), "large": Counter({"tp1pp1": 2})},
            {
                "small": Counter({"tp1pp1": 1}),
                "large": Counter({"tp2pp2": 2}),
            },
        )

        def shapes() -> Shapes:
            """What workers report, by tier."""
            cards = [i.model for i in mesh.view.instances(Role.WORKER) if i.model is not None and not i.draining]
            return {tier: Counter(card.shape for card in cards if card.tier == tier) for tier in least}

        async def until(wanted: Shapes) -> None:
            async with asyncio.timeout(WAIT_S):
                while (now := shapes()) != wanted or len(mesh.watcher.watched) != 4 + 3:
                    assert all(now[tier].total() >= count for tier, count in least.items())
                    await asyncio.sleep(0.02)

        def plan(*arguments: str) -> str:
            done = penstock("plan", *arguments, "-a", mesh.admin_addresses[0])
            assert done.returncode == 0, done.stderr
            return " ".join(done.stdout.split())

        async with (
            AsyncClient(mesh.grpc_addresses, admin=mesh.admin_addresses) as client,
            steady_requests(client, STREAMS),
        ):
            assert shapes() == own
            told = await asyncio.to_thread(plan, "set", "--shape", "large=tp2pp2")
            assert "1. start 2 x large (TP=2, PP=2) 2. stop 2 x large (TP=1)" in told
            assert "2 x TP=2, PP=2" in told
            await until(other)
            async with asyncio.timeout(WAIT_S):
                async for status in client.watch_status(0.1):  # whose router hears of what has gone a little later
                    if [i.shape for i in status.instances if i.tier == "large"] == ["tp2pp2"] * 2:
                        break
            told = await asyncio.to_thread(plan, "rollback")
            assert "1. start 2 x large (TP=1) 2. stop 2 x large (TP=2, PP=2)" in told
            await until(own)
