"""Between plans, `penstock up` has as many workers as the leading planner asks for by live load, if the mesh file says so.

Also of a tier that the plan has none of, while requests need it. Workers of other shapes start before the old ones drain.
"""

import asyncio
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncClient, AsyncPlannerClient
from penstock.local.mesh import LocalMesh
from penstock.placement.mesh_input import MeshOptions
from penstock.services.domain.instances import Role
from tests.conftest import FAST, write_mesh_file
from tests.support.cli import penstock
from tests.support.measured import metrics_page
from tests.support.steady_requests import steady_requests
from tests.support.waiting import until

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
        tier["simulated"] = PACE
    planner = {"max_instances": MOST, "scaling": {"enabled": True, "rise_s": 1, "hold_s": 3}}
    async with LocalMesh(MeshOptions(write_mesh_file(tmp_path, tiers, planner=planner), tmp_path)) as mesh:

        def exported() -> dict[str, int]:
            (record,) = mesh.view.instances(Role.PLANNER)
            text = metrics_page(record.metrics_address)
            counts = re.findall(r'^penstock_desired_replicas.*penstock_tier="(\w+)".* (\S+)$', text, re.MULTILINE)
            return {tier: int(float(count)) for tier, count in counts}

        async def scaled_to(small: int) -> None:
            await until(lambda: len(mesh.view.workers("small")) == small and len(mesh.watcher.watched) == 5 + small)
            assert await asyncio.to_thread(exported) == {"small": small, "large": 1}

        async with AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin) as client:
            async with steady_requests(client, STREAMS):
                await scaled_to(MOST)
            await scaled_to(1)
            assert (await client.status()).plan_revision == 1


@pytest.mark.slow
async def test_a_request_starts_a_worker_of_a_tier_that_has_none_or_takes_the_next_tier(tmp_path: Path) -> None:
    """It waits for the last tier, and for the one that it names. Without requests such a tier has no worker again."""
    tiers: list[dict[str, Any]] = [
        {"name": "small", "model": "s", "threshold": 100},
        {"name": "medium", "model": "m", "threshold": 100},
        {"name": "large", "model": "l"},
    ]
    parts = {
        "planner": {"scaling": {"enabled": True, "rise_s": 1, "hold_s": 2}},
        "router": {"tier_wait_s": WAIT_S},
    }
    async with (
        asyncio.timeout(WAIT_S),
        LocalMesh(MeshOptions(write_mesh_file(tmp_path, tiers, **parts), tmp_path)) as mesh,
        AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin) as client,
        AsyncPlannerClient(mesh.addresses.planner) as planner,
    ):

        async def without(*names: str) -> None:
            while any(mesh.view.workers(name) for name in names):
                await asyncio.sleep(0.02)

        plan = await planner.get_plan()
        counts = {"small": 1, "medium": 0, "large": 0}
        await planner.set_plan(replace(plan, tiers=tuple(replace(t, instances=counts[t.name]) for t in plan.tiers)))
        await without("medium", "large")
        reply = await client.generate("hello", temperature=0)
        assert [(tier.tier, bool(tier.instance_id)) for tier in reply.tiers] == [
            ("small", True),
            ("medium", False),
            ("large", True),
        ]
        await without("medium", "large")
        assert (await client.generate("hello", model="medium", temperature=0)).tier == "medium"
        assert not mesh.view.workers("large")
        await without("medium")
        assert (await client.status()).plan_revision == 2


PACE = FAST | {"overhead_ms": 10.0, "reply_tokens": 100}
"""Of a step: so that replies run while workers are replaced."""

Shapes = dict[str, Counter[str]]


@pytest.mark.slow
async def test_workers_of_other_shapes_replace_the_old_ones_and_no_reply_is_lost(tmp_path: Path) -> None:
    """`plan set --shape` says the steps; a rollback restores. At no time does a tier serve with fewer workers than before."""
    tiers: list[dict[str, Any]] = [
        {"name": "small", "model": "s", "threshold": 80, "simulated": PACE},
        {"name": "large", "model": "l", "simulated": PACE, "workers": 2},
    ]
    async with LocalMesh(MeshOptions(write_mesh_file(tmp_path, tiers), tmp_path)) as mesh:
        least = {"small": 1, "large": 2}
        own, other = ({"small": Counter({"tp1pp1": 1}), "large": Counter({shape: 2})} for shape in ("tp1pp1", "tp2pp2"))

        def shapes() -> Shapes:
            """What workers report, by tier."""
            cards = [i.model for i in mesh.view.instances(Role.WORKER) if i.model is not None and not i.draining]
            return {tier: Counter(card.shape for card in cards if card.tier == tier) for tier in least}

        async def reached(wanted: Shapes) -> None:
            async with asyncio.timeout(WAIT_S):
                while (now := shapes()) != wanted or len(mesh.watcher.watched) != 4 + 3:
                    assert all(now[tier].total() >= count for tier, count in least.items())
                    await asyncio.sleep(0.02)

        def plan(*arguments: str) -> str:
            done = penstock("plan", *arguments, "-a", mesh.addresses.admin[0])
            assert done.returncode == 0, done.stderr
            return " ".join(done.stdout.split())

        async with (
            AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin) as client,
            steady_requests(client, STREAMS),
        ):
            assert shapes() == own
            told = await asyncio.to_thread(plan, "set", "--shape", "large=tp2pp2")
            assert "1. start 2 x large (TP=2, PP=2) 2. stop 2 x large (TP=1)" in told
            assert "2 x TP=2, PP=2" in told
            await reached(other)
            async with asyncio.timeout(WAIT_S):
                async for status in client.watch_status(0.1):  # whose router hears of what has gone a little later
                    if [i.shape for i in status.instances if i.tier == "large"] == ["tp2pp2"] * 2:
                        break
            told = await asyncio.to_thread(plan, "rollback")
            assert "1. start 2 x large (TP=1) 2. stop 2 x large (TP=2, PP=2)" in told
            await reached(own)
