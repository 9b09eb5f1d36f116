"""The example meshes that need no GPU start, and answer."""

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from penstock import AsyncClient, AsyncPlannerClient, Judged
from penstock.local import LocalMesh, MeshOptions
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


async def test_one_tier_needs_no_judge(tmp_path: Path) -> None:
    """The mesh serves a real model, `cascade` and the tier's own name alike, without a judge process."""
    options = MeshOptions(EXAMPLES / "mesh-one-tier.yaml", tmp_path, {"only": 1}, any_ports=True)
    async with LocalMesh(options) as mesh:
        assert Counter(name.partition("-")[0] for name in mesh.watcher.watched) == {
            "redis": 1, "planner": 1, "worker": 1, "router": 1
        }  # fmt: skip
        async with AsyncClient(mesh.grpc_addresses, admin=mesh.admin_addresses) as client:
            for model in ("cascade", "only"):
                reply = await client.generate("What is 12 + 30?", model=model, temperature=0)
                assert reply.text
                assert [(tier.tier, tier.score) for tier in reply.tiers] == [("only", None)]


async def test_simulated_tiers_need_no_models(tmp_path: Path) -> None:
    """The cascade judges by confidence, and the threshold decides who answers, as the file says."""
    async with LocalMesh(MeshOptions(EXAMPLES / "mesh-simulated.yaml", tmp_path, any_ports=True)) as mesh:
        planner = mesh.planner_address
        async with (
            AsyncClient(mesh.grpc_addresses, admin=mesh.admin_addresses) as client,
            AsyncPlannerClient(planner) as plans,
        ):
            judged = [event async for event in client.stream("hello") if isinstance(event, Judged)]
            assert [(event.scorer, round(event.score or 0), event.accepted) for event in judged] == [
                ("confidence", 90, True)
            ]
            plan = await plans.get_plan()
            assert [(tier.name, tier.model) for tier in plan.tiers] == [("small", "small"), ("large", "large")]
            strict = dataclasses.replace(plan.tiers[0], threshold=95.0)
            made = await plans.set_plan(dataclasses.replace(plan, tiers=(strict, plan.tiers[1])))
            async with asyncio.timeout(60):
                while (await client.status()).plan_revision < made.revision:
                    await asyncio.sleep(0.05)
            assert (await client.generate("hello")).tier == "large"
