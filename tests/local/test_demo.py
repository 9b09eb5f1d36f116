"""`penstock demo` on the shipped models: what it writes, what the cascade reaches, and that it leaves nothing running."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TIERS


def processes_in(folder: Path) -> list[str]:
    """Command lines of processes that were given this folder's Redis data, or log there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            files = [str(fd.readlink()) for fd in (entry / "fd").iterdir()]
        except OSError:
            continue
        if str(folder).encode() in words or any(str(folder) in file for file in files):
            found.append(words.replace(b"\0", b" ").decode(errors="replace")[:200])
    return found


def test_the_demo_shows_a_cascade_that_is_worth_it(tmp_path: Path) -> None:
    out, folder = tmp_path / "demo.json", tmp_path / "run"
    command = [sys.executable, "-m", "penstock.cli.main", "demo", "--prompts", "40", "--out", str(out)]
    done = subprocess.run(
        [*command, "--folder", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["prompts"] == 40
    assert [tier["name"] for tier in figures["tiers"]] == list(TIERS)
    small, medium, large = (tier["accuracy"] for tier in figures["tiers"])
    assert small < medium < large
    assert figures["cascade"]["accuracy"] >= large - 0.05
    assert figures["tiers"][2]["share_answered"] < 0.5
    assert sum(tier["share_answered"] for tier in figures["tiers"]) == pytest.approx(1)
    for key in ("mean_latency_s", "ttft_p50_s", "ttft_p95_s", "tokens_per_s"):
        assert figures["cascade"][key] > 0
    for request in figures["requests"]:
        escalated = TIERS.index(request["tier"])
        assert set(request["scores"]) >= set(TIERS[: min(escalated + 1, 2)])
        assert all(0 <= score <= 100 for score in request["scores"].values())
    assert "cascade" in done.stdout
    assert processes_in(folder) == []
