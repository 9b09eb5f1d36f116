"""A package of somebody else's adds an engine and a scorer: it is installed, and nothing here is edited."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import AsyncClient
from penstock.local.runfile import read_run_file
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

MESH: dict[str, Any] = {
    "name": "extended",
    "tiers": [
        {"name": "twice", "engine": "echo", "threshold": 50, "echo": {"times": 2}},
        {"name": "once", "engine": "echo", "max_running": 4},
    ],
    "judge": {"scorers": [{"name": "brief", "kind": "brief", "words": 4}]},
    "router": {"grpc_port": 0, "http_port": 0, "admin_port": 0},
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed to."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    source = folder.with_name("source")
    subprocess.run(["cp", "-r", ROOT / "tests/extension_package", source], check=True)
    subprocess.run([*pip, "--target", folder, source], check=True, timeout=300)
    return folder


def penstock(*arguments: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command. path: of further packages."""
    environment = os.environ | ({"PYTHONPATH": str(path)} if path is not None else {})
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=700, check=False, env=environment)


async def test_a_mesh_serves_with_an_engine_and_a_scorer_of_another_package(installed: Path, tmp_path: Path) -> None:
    """Brief answers of the first tier are accepted; the others escalate. Bad options are named, and so is what is missing."""
    file, folder = tmp_path / "mesh.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(MESH))
    alone = penstock("check", file)
    assert alone.returncode == 1
    assert "tiers[0].engine: no 'echo' is installed" in alone.stderr
    assert "judge.scorers[0].kind: no 'brief' is installed" in alone.stderr
    up = penstock("--folder", folder, "up", "-d", "-m", file, path=installed)
    assert up.returncode == 0, up.stderr
    try:
        running = read_run_file(folder)
        assert running is not None
        async with AsyncClient(running.grpc, timeout_s=60) as client, asyncio.timeout(120):
            brief, long = await client.generate("say this"), await client.generate("say all of this")
            assert (brief.text, brief.tier) == ("say this say this", "twice")
            assert (long.text, long.tier) == ("say all of this", "once")
            assert [tier.score for tier in long.tiers] == [0, None]
    finally:
        assert penstock("--folder", folder, "down").returncode == 0
    file.write_text(yaml.safe_dump(MESH | {"judge": {"scorers": [{"name": "brief", "kind": "brief", "words": 0}]}}))
    bad = penstock("check", file, path=installed)
    assert "judge.scorers[0].words: Input should be greater than or equal to 1" in bad.stderr
