"""The programs of the tutorials, and the example meshes that need no GPU, run as they are."""

import asyncio
import dataclasses
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from penstock import AsyncClient, AsyncPlannerClient, Judged
from penstock.local.mesh import LocalMesh
from penstock.placement.mesh_input import MeshOptions
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


def with_free_ports(mesh_file: Path, folder: Path, **replaced: str) -> Path:
    """A copy of a mesh file whose router takes any ports; models are found from the folder of the copy too."""
    text = mesh_file.read_text().replace("models/family", str(ROOT / "models" / "family"))
    text = re.sub(r"(grpc_port|http_port): \d+", r"\1: 0", text)
    if "router:" not in text:
        text += "\nrouter: { grpc_port: 0, http_port: 0 }\n"
    for old, new in replaced.items():
        text = text.replace(old, new)
    path = folder / mesh_file.name
    path.write_text(text)
    return path


def run(program: str, mesh_file: Path) -> str:
    command = [sys.executable, str(EXAMPLES / program), str(mesh_file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_cascade(tmp_path: Path) -> None:
    """The small tier answers the sum, until its threshold is one that it hardly ever reaches."""
    shown = run("first_cascade.py", with_free_ports(ROOT / "mesh.yaml", tmp_path))
    before, after = shown.split("with thresholds of 100:")
    assert re.search(r"12 \+ 30\? -> .*42' by small", before)
    assert re.search(r"12 \+ 30\? -> .*42' by (medium|large)", after)


async def test_your_own_endpoints(tmp_path: Path) -> None:
    """The endpoints are tiers of another mesh, whose log-probabilities the default judge takes."""
    (tmp_path / "served").mkdir()
    async with LocalMesh(MeshOptions(ROOT / "mesh.yaml", tmp_path / "served", any_ports=True)) as served:
        url = {"http://127.0.0.1:8000": f"http://{served.addresses.http[0]}"}
        shown = await asyncio.to_thread(
            run, "your_own_endpoints.py", with_free_ports(EXAMPLES / "mesh-endpoints.yaml", tmp_path, **url)
        )
    assert "answers of small with log-probabilities are judged by their log-probabilities" in shown  # by `check`
    assert re.search(r"cascade: .*42' \[\('small', \d", shown)
    assert re.search(r"large: .*42' \[\('large', None\)\]", shown)


def test_plan_and_apply(tmp_path: Path) -> None:
    """What is applied is what was planned, and the rollback takes it back."""
    shown = run("plan_and_apply.py", with_free_ports(EXAMPLES / "mesh-planned.yaml", tmp_path))
    first, applied, back = re.findall(r"revision \d+, (\S+): .*: (\[.*\])", shown)
    assert [source for source, _ in (first, applied, back)] == ["mesh-file", "planned", "rollback"]
    assert first[1] == back[1] != applied[1]


async def test_one_tier_needs_no_judge(tmp_path: Path) -> None:
    """The mesh serves a real model, `cascade` and the tier's own name alike, without a judge process."""
    options = MeshOptions(EXAMPLES / "mesh-one-tier.yaml", tmp_path, {"only": 1}, any_ports=True)
    async with LocalMesh(options) as mesh:
        assert Counter(name.partition("-")[0] for name in mesh.watcher.watched) == {
            "redis": 1, "planner": 1, "worker": 1, "router": 1
        }  # fmt: skip
        async with AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin) as client:
            for model in ("cascade", "only"):
                reply = await client.generate("What is 12 + 30?", model=model, temperature=0)
                assert reply.text
                assert [(tier.tier, tier.score) for tier in reply.tiers] == [("only", None)]


async def test_simulated_tiers_need_no_models(tmp_path: Path) -> None:
    """The cascade judges by confidence, and the threshold decides who answers, as the file says."""
    async with LocalMesh(MeshOptions(EXAMPLES / "mesh-simulated.yaml", tmp_path, any_ports=True)) as mesh:
        planner = mesh.addresses.planner
        async with (
            AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin) as client,
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
            while (await client.status()).plan_revision < made.revision:
                await asyncio.sleep(0.05)
            assert (await client.generate("hello")).tier == "large"
