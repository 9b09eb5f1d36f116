"""`penstock plan` on the example files: what it refuses before solving, what it says, and what it leaves behind."""

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.planner_service.question.demand import draw_demand
from penstock.planner_service.question.planning_options import LEAST_REQUESTS
from penstock.planner_service.replay.cascade_simulation import run_cascade
from tests.conftest import ROOT
from tests.support.cli import penstock
from tests.support.inputs import read_quality, read_site
from tests.support.plain_plans import plan_cascade
from tests.support.questions import asked

run = partial(penstock, columns=500)

EXAMPLES = ROOT / "examples"
FILES = ("--cluster", EXAMPLES / "cluster-4x8-h100.yaml", "--models", EXAMPLES / "deepseek-cascade.yaml",
         "--quality", EXAMPLES / "judged.csv")  # fmt: skip
TRACE = EXAMPLES / "trace.csv"


def planned(*more: object, trace: Path = TRACE, **fields: Any) -> Any:
    return run("plan", *asked(runs=1, **fields), *FILES, "--trace", trace, "--min-quality", 80, *more)


@pytest.mark.slow
def test_nothing_is_written_unless_it_is_asked_for(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        done = planned(requests=60)
        assert done.returncode == 0, done.output
        assert "written" not in done.output
        assert not list(tmp_path.iterdir())
        done = planned("--out", "plan.json", "--plot", requests=60)
        assert done.returncode == 0, done.output
        pictures = {f"plan{which}.{kind}" for which in ("", "-nodes") for kind in ("png", "svg")}
        assert {path.name for path in tmp_path.iterdir()} == {"plan.json", *pictures}
        plan = json.loads(Path("plan.json").read_text())
        done = planned("--no-plot", "--out", "-", requests=60)
        assert done.returncode == 0, done.output
        shown = json.loads(done.stdout)
        assert {k: v for k, v in shown.items() if k != "seconds"} == {k: v for k, v in plan.items() if k != "seconds"}
        assert len(list(tmp_path.iterdir())) == 1 + len(pictures)
        assert planned("--out", "-", "--plot", requests=60).returncode == 2


@pytest.mark.parametrize("option", [("--plot",), ("--render", "compose")])
def test_what_goes_beside_the_plan_file_needs_one(option: tuple[str, ...]) -> None:
    """Said before solving: the files do not exist, and are not read."""
    done = run(
        "plan", *(f for pair in zip(FILES[::2], ("none",) * 3, strict=True) for f in pair), "--trace", "none", *option
    )
    assert done.returncode == 2
    assert f"{option[0]}: needs --out" in done.output


def test_a_picture_does_not_overwrite_the_plan(tmp_path: Path) -> None:
    for command in (("plan", *FILES, "--trace", TRACE), ("stages", "--instances", 2, "--trace", TRACE)):
        done = run(*command, "--out", tmp_path / "plan.svg", "--plot")
        assert done.returncode == 2
        assert "overwritten" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_short_trace_is_read_over_and_over_and_a_tiny_one_is_refused(tmp_path: Path) -> None:
    """More requests than a trace has are refused, too, not clamped in silence: neither for a plan nor for a replay."""
    done = planned(requests=100_000_000)
    assert done.returncode == 2
    assert "requests: must be from 1 to the trace's 3000, not 100000000" in done.output
    lines = TRACE.read_text().splitlines()
    short, tiny, out = tmp_path / "short.csv", tmp_path / "tiny.csv", tmp_path / "plan.json"
    short.write_text("\n".join(lines[: LEAST_REQUESTS + 1]) + "\n")
    tiny.write_text("\n".join(lines[:3]) + "\n")
    done = planned("--out", out, trace=short)
    assert done.returncode == 0, done.output
    assert json.loads(out.read_text())["inputs"]["requests"] > LEAST_REQUESTS
    done = planned(trace=tiny)
    assert done.returncode == 2
    assert f"requests: must be at least {LEAST_REQUESTS} to plan on, not 2" in done.output
    assert run("simulate", "--plan", out, "--trace", tiny, "--json").returncode == 0
    assert run("simulate", "--plan", out, "--trace", tiny, "--requests", 3).returncode == 2


@pytest.mark.slow
def test_a_rate_beyond_the_cluster_is_refused_and_a_burst_is_planned_where_that_is_asked_for(tmp_path: Path) -> None:
    """What binds is said, with a rate that can be had; a plan for a burst says that it is one."""
    out = tmp_path / "plan.json"
    beyond = ("--rate", 100_000, "--out", out)
    done = planned(*beyond, requests=100, objective="largest-tier")
    assert done.returncode == 3
    assert "the rate binds" in done.output
    assert not out.exists()
    rate = float(done.output.partition("is good for ")[2].partition("/s")[0])
    done = planned(*beyond, requests=100, objective="largest-tier", allow_overload=True)
    assert done.returncode == 0, done.output
    assert "overloaded" in done.output
    plan = json.loads(out.read_text())
    assert plan["load"]["overloaded"]
    assert plan["breaks_at_rate"] == plan["load"]["sustained_per_s"] < plan["rate_per_s"]
    assert rate == pytest.approx(0.75 * plan["breaks_at_rate"], rel=0.01)
    assert max(tier["utilisation"] for tier in plan["tiers"]) == pytest.approx(100_000 / plan["breaks_at_rate"])


@pytest.mark.slow
def test_a_rate_that_is_sustained_does_not_make_requests_wait_longer_and_longer() -> None:
    """The simulator agrees with where a plan is said to break: at 0.95 of that rate the last wait as the first.

    At 1.05 of it they wait longer.
    """
    site = read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")
    judged, gaps = read_quality(EXAMPLES / "judged.csv", site.tiers), np.full(400, 0.1)
    plan = plan_cascade(site, draw_demand(judged, np.cumsum(gaps), seed=1), min_quality=80)
    assert plan.load is not None
    late = []
    for share in (0.95, 1.05):
        arrivals = np.arange(4000) / (share * plan.load.sustained_per_s)
        demand = draw_demand(judged, arrivals, seed=1)
        strategies = [tier.strategy for tier in plan.tiers]
        total_s = run_cascade(site, demand, plan.thresholds, strategies, plan.dispatch).total_s
        late.append(float(np.median(total_s[-800:]) / np.median(total_s[1000:1800])))
    assert late[0] < 1.15
    assert late[1] > 1.25
