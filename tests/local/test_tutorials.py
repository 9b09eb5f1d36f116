"""The programs of the tutorials run as they are, and show what the tutorials say."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.local import LocalMesh, MeshOptions
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
        url = {"http://127.0.0.1:8000": f"http://{served.http_addresses[0]}"}
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
