"""SLO classes of `penstock plan`, `simulate` and `plan capacity` on the example files."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.cli import penstock
from tests.support.questions import asked

run = partial(penstock, columns=300)

EXAMPLES = ROOT / "examples"
SITE = ("--cluster", EXAMPLES / "cluster-4x8-h100.yaml", "--models", EXAMPLES / "llama-3.1-cascade.yaml")
TRACE = ("--trace", EXAMPLES / "trace.csv")
CLASSES = ("--slo", "chat=2s,100ms,0.7", "--slo", "batch=none")


@pytest.mark.slow
def test_plan_capacity_says_how_many_gpus_a_trace_needs() -> None:
    """More requests per second need more GPUs; at the rate that is named as capacity the target is kept."""
    counts = []
    for rate in (2, 50):
        done = run("plan", "capacity", *SITE, *TRACE, *CLASSES, "--requests", 300, "--rate", rate, "--json")
        assert done.returncode == 0, done.output
        figures = json.loads(done.stdout)
        assert figures["attainment"] >= figures["target_attainment"] == 0.9
        assert figures["capacity_per_s"] >= 0.98 * rate
        assert figures["gpus"] == sum(part["tp"] * part["pp"] * part["count"] for part in figures["replicas"])
        assert [one["name"] for one in figures["slo"]] == ["chat", "batch"]
        assert figures["slo"][0]["attainment"] >= 0.9
        assert figures["slo"][1]["attainment"] is None
        counts.append(figures["gpus"])
    assert counts[0] < counts[1]
    shown = run("plan", "capacity", *SITE, *TRACE, *CLASSES, "--requests", 300, "--rate", 2, "--tier", "small")
    assert shown.returncode == 0, shown.output
    assert "GPUs" in shown.output
    assert "attainment" in shown.output


@pytest.mark.slow
def test_plan_and_simulate_report_the_attainment_of_classes(tmp_path: Path) -> None:
    """The plan file gets a key `slo`; a replay attains nothing of a first token within a millisecond."""
    plan = ("plan", "--cluster", EXAMPLES / "cluster-4x8-h100.yaml", "--models", EXAMPLES / "deepseek-cascade.yaml",
            "--quality", EXAMPLES / "judged.csv", *TRACE, "--min-quality", 80,
            *asked(runs=1, requests=60))  # fmt: skip
    file = tmp_path / "plan.json"
    done = run(*plan, *CLASSES, "--out", file)
    assert done.returncode == 0, done.output
    written = json.loads(file.read_text())
    assert [one["name"] for one in written["slo"]] == ["chat", "batch"]
    assert "SLOs, with the SLO batch policy" in done.output
    replay = ("simulate", "--plan", file, *TRACE, "--requests", 60, "--json")
    for classes, attained in ((CLASSES, True), (("--slo", "chat=1ms,100ms"), False)):
        replayed = json.loads(run(*replay, *classes).stdout)
        assert (replayed["slo"][0]["attainment"] > 0.5) is attained
    assert json.loads(run(*replay).stdout)["slo"] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chat", "must be NAME=TTFT"),
        ("chat=2s", "must be NAME=TTFT"),
        ("chat=2s,fast", "must be a time"),
        ("chat=2s,50ms,1.5", "share"),
        ("=2s,50ms", "must be NAME=TTFT"),
    ],
)
def test_a_bad_class_is_refused_before_files_are_read(text: str, message: str) -> None:
    done = run("plan", "capacity", "--cluster", "none", "--models", "none", "--trace", "none", "--slo", text)
    assert done.returncode == 2
    assert message in done.output
