"""`penstock demo` on the shipped models: what it writes, what the cascade reaches, and that it leaves nothing running."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TIERS

pytestmark = pytest.mark.slow


def processes_in(folder: Path) -> list[str]:
    """Command lines of processes that were given this folder's Redis data, or log there."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            files = [str(fd.readlink()) for fd in (entry / "fd").iterdir()]
        except OSError:
            continue
        if str(folder).encode() in words or any(str(folder) in file for file in files):
            lines.append(words.replace(b"\0", b" ").decode(errors="replace")[:200])
    return lines


def test_the_demo_shows_a_cascade_that_is_worth_it(tmp_path: Path) -> None:
    """Each tier is better than the one below, the cascade nearly as good as the last; a killed worker loses nothing."""
    out, folder = tmp_path / "demo.json", tmp_path / "run"
    command = [sys.executable, "-m", "penstock.cli.main", "demo", "--prompts", "40", "--rate", "20", "--out", str(out)]
    done = subprocess.run(
        [*command, "--folder", str(folder)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["prompts"] == 40
    assert figures["rate_per_s"] == 20
    assert [tier["name"] for tier in figures["tiers"]] == list(TIERS)
    small, medium, large = (tier["accuracy"] for tier in figures["tiers"])
    assert small < medium < large
    assert figures["cascade"]["accuracy"] >= large - 0.05
    assert figures["tiers"][2]["share_answered"] < 0.5
    assert sum(tier["share_answered"] for tier in figures["tiers"]) == pytest.approx(1)
    for key in ("mean_latency_s", "ttft_p50_s", "ttft_p95_s", "tokens_per_s"):
        assert figures["cascade"][key] > 0
    for run in (*figures["tiers"], figures["cascade"]):
        assert run["cpu_s_per_answer"] > 0
        assert run["goodput_per_s"] >= 0
        assert run["failed"] == 0
    for request in figures["requests"]:
        asked = TIERS[: TIERS.index(request["tier"]) + 1]
        assert set(request["scores"]) <= set(asked[:2])
        assert request["tier"] == "large" or request["tier"] in request["scores"]
        assert all(0 <= score <= 100 for score in request["scores"].values())
    (plain,) = figures["variants"].values()
    assert 0 < figures["cascade"]["tokens_in_vain"] <= 0.75 * plain["tokens_in_vain"]
    assert figures["cascade"]["accuracy"] >= plain["accuracy"] - 0.05
    failover = figures["failover"]
    assert failover["worker"].startswith("worker-")
    assert failover["answered"] == failover["requests"] == 24
    assert failover["elsewhere"] > 0
    assert figures["saved"] in " ".join(done.stdout.split())
    report = done.stdout.partition("The mesh is ready")[2]
    assert [line for line in report.splitlines() if len(line) > 80 and str(tmp_path) not in line] == []
    assert processes_in(folder) == []
