"""`penstock plan` and `penstock simulate`, from files to files; and the paper's published plans."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.files.profiles import Profile, write_profile
from penstock.planner_service.manifests.mesh_tiers import mesh_tiers
from penstock.planner_service.question.demand import draw_demand
from penstock.planner_service.question.site import Site, replica_kinds
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import Dispatch, Replica
from penstock.question_files.errors import FileError
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ReplicaShape, fit, roofline
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from tests.conftest import ROOT
from tests.support.cli import penstock as run
from tests.support.inputs import read_quality, read_site
from tests.support.plain_plans import plan_cascade
from tests.support.present import present
from tests.support.questions import asked
from tests.support.tables import judged_header, write_table, write_trace

CLUSTER, MODELS = ROOT / "examples" / "cluster-4x8-h100.yaml", ROOT / "examples" / "deepseek-cascade.yaml"
TIERS = ("small", "medium", "large")

# CASCADIA, tables 2 and 3: GPUs and (count, TP, PP) by tier; None for a tier that is not deployed.
PUBLISHED = {
    "(90, 1)": ((4, 8, 20), ([(4, 1, 1)], [(2, 4, 1)], [(1, 4, 3), (1, 8, 1)])),
    "(85, 1)": ((4, 12, 16), ([(2, 2, 1)], [(6, 2, 1)], [(2, 8, 1)])),
    "(80, 1)": ((6, 14, 12), ([(6, 1, 1)], [(5, 2, 1), (1, 4, 1)], [(1, 4, 3)])),
    "(80, 2)": ((8, 16, 8), ([(6, 1, 1), (1, 2, 1)], [(8, 2, 1)], [(1, 8, 1)])),
    "(80, 3)": ((18, 14, 0), ([(10, 1, 1), (4, 2, 1)], [(2, 4, 1), (3, 2, 1)], [])),
    "(70, 3)": ((24, 8, 0), ([(16, 1, 1), (4, 2, 1)], [(4, 2, 1)], [])),
}


@pytest.fixture(scope="module")
def site() -> Site:
    return read_site(CLUSTER, MODELS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trace and a judged sample of our own making: larger models score higher, long prompts score lower."""
    folder, rng = tmp_path_factory.mktemp("plan"), np.random.default_rng(7)
    trace, quality = folder / "trace.csv.gz", folder / "quality.csv"
    arrivals = np.cumsum(rng.exponential(0.2, 400))
    write_trace(trace, ((f"{at:.4f}", rng.integers(20, 900), rng.integers(5, 300)) for at in arrivals))
    rows = []
    for _ in range(200):
        length, hard = int(rng.integers(20, 900)), rng.normal(0, 20)
        answers = ((rng.integers(20, 300), round(float(np.clip(base - hard, 0, 100)))) for base in (60, 75, 90))
        rows.append((length, *(cell for answer in answers for cell in answer)))
    write_table(quality, judged_header(TIERS), rows)
    return trace, quality


def inputs(data: tuple[Path, Path]) -> tuple[object, ...]:
    return ("--cluster", CLUSTER, "--models", MODELS, "--trace", data[0], "--quality", data[1])


def planned(data: tuple[Path, Path], out: Path, *more: object, **fields: Any) -> Any:
    return run("plan", *inputs(data), *asked(requests=150, runs=2, **fields), "--out", out, *more)


LARGEST_TIER = {"objective": "largest-tier"}


@pytest.mark.slow
@pytest.mark.parametrize("case", PUBLISHED)
def test_published_plans_can_be_said_and_run(case: str, site: Site, data: tuple[Path, Path]) -> None:
    """Every row of table 3 fits its GPUs, has table 2's counts, and can be simulated."""
    counts, shapes = PUBLISHED[case]
    strategies = []
    for tier, (gpus, model, parts) in enumerate(zip(counts, site.models, shapes, strict=True)):
        replicas = []
        for count, tp, pp in parts:
            shape = ReplicaShape(tp, pp)
            room = fit(model, shape, site.cluster, site.runtime, 2000)
            assert room.ok, room.reason
            replicas.append((Replica(shape, roofline(model, shape, site.cluster, site.runtime), room.kv_tokens), count))
        strategy = Strategy(tuple(replicas), 0.0)
        assert strategy.gpus == gpus
        strategies.append(strategy)
        searched = {r.shape for r in replica_kinds(site, tier, 32, 1200)[0]}
        assert {replica.shape for replica, _ in replicas} <= searched
    assert str(strategies[0]).startswith("(DP=") or counts[0] < 2
    demand = draw_demand(read_quality(data[1], TIERS), read_trace(data[0]).arrival_s, seed=1)
    thresholds = (80.0, 0.0) if counts[2] == 0 else (80.0, 80.0)
    run = run_cascade(site, demand, thresholds, strategies, Dispatch.CAPACITY)
    reports, total_s = run.reports, run.total_s
    assert reports[0].requests == 400
    assert (total_s > 0).all()


@pytest.mark.slow
def test_a_plan_from_files_to_files(data: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    found = planned(data, out, "--min-quality", 84, "--rate", 20, "--plot", **LARGEST_TIER)
    assert found.returncode == 0, found.output
    plan = json.loads(out.read_text())
    assert plan["feasible"]
    assert plan["promise"]["least_quality"] >= 84
    proof = plan["optimality"]
    assert proof["proved"] == (proof["proof"] != "searched") == (proof["gap"] == 0)
    assert sum(tier["gpus"] for tier in plan["tiers"]) <= 32
    for tier in plan["tiers"]:
        assert tier["gpus"] == sum(r["tp"] * r["pp"] * r["count"] for r in tier["replicas"])
    assert sum(tier["share_answered"] for tier in plan["tiers"]) == pytest.approx(1)
    assert plan["latency_p95_s"] == pytest.approx(max(tier["p95_s"] for tier in plan["tiers"]))
    assert plan["end_to_end_p95_s"] > 0
    assert len(plan["thresholds"]) == 2
    assert (tmp_path / "plan.svg").read_text().count("<svg") == 1
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plan-nodes.svg").read_text().count("<svg") == 1
    assert "plan-nodes.png" in "".join(found.output.split())
    for word in ("small", "quality", "routings", "plan.json"):
        assert word in found.output
    words = " ".join(found.output.split())
    assert ("proved" in words) == (not proof["proved"])
    assert "on 2 other stretches of the trace" in words
    assert re.search(r"of the trace, of \d+ latencies, p95", words)
    again = planned(
        data, tmp_path / "again.json", "--min-quality", 84, "--rate", 20, "--json", "--no-plot", **LARGEST_TIER
    )
    told = json.loads(again.stdout)
    assert {k: v for k, v in told.items() if k != "seconds"} == {k: v for k, v in plan.items() if k != "seconds"}
    replayed = run("simulate", "--plan", out, "--trace", data[0], "--requests", 300, "--rate", 20, "--json")
    assert replayed.returncode == 0, replayed.output
    figures = json.loads(replayed.stdout)
    assert figures["requests"] == 300
    assert figures["end_to_end_s"]["p95"] == pytest.approx(plan["end_to_end_p95_s"], rel=0.5)
    assert "tier" in run("simulate", "--plan", out, "--trace", data[0]).output


@pytest.mark.slow
def test_every_latency_is_planned_and_replayed_as_it_is_named(data: tuple[Path, Path], tmp_path: Path) -> None:
    """Each plan has the least of the latency that it was made for; a target that is missed is named as that latency."""
    kinds = {"first-token": "first_token", "pace": "pace"}
    plans = {}
    common = (*inputs(data), "--min-quality", 84)
    drawn = {"requests": 100, "runs": 1, "percentile": 99}
    for objective in ("end-to-end", *kinds):
        out = tmp_path / f"{objective}.json"
        about = asked(**drawn, objective=objective)
        done = run("plan", *common, *about, "--rate", 20, "--no-plot", "--out", out)
        assert done.returncode == 0, done.output
        plans[objective] = json.loads(out.read_text())
    for objective, field in kinds.items():
        plan, whole = plans[objective], plans["end-to-end"]
        latency = plan["latency"]
        assert (latency["objective"], latency["percentile"]) == (objective, 99)
        assert latency["seconds"] == plan["user_latency_s"][field]["p99"]
        assert latency["seconds"] <= whole["user_latency_s"][field]["p99"]
        assert latency["interval_s"]["runs"] == 1
        assert plan["user_latency_s"]["end_to_end"]["p99"] >= whole["user_latency_s"]["end_to_end"]["p99"]
        again = run("simulate", "--plan", tmp_path / f"{objective}.json", "--trace", data[0], "--rate", 20, "--json")
        assert again.returncode == 0, again.output
        assert set(json.loads(again.stdout)["user_latency_s"]) == {"end_to_end", "first_token", "pace"}
    shown = run("simulate", "--plan", tmp_path / "pace.json", "--trace", data[0], "--rate", 20)
    assert "first visible token" in shown.output
    about = asked(**drawn, objective="first-token")
    missed = run("plan", *common, *about, "--rate", 20, "--max-latency", 0.0001, "--json")
    assert missed.returncode == 3
    said = json.loads(missed.stdout)
    assert said["binds"] == "max_latency_s"
    assert "p99 time to the first visible token" in said["reason"]


@pytest.mark.slow
def test_what_cannot_be_planned_says_why(data: tuple[Path, Path], tmp_path: Path, site: Site) -> None:
    out = tmp_path / "plan.json"
    high = planned(data, out, "--min-quality", 100)
    assert high.returncode == 3
    assert "the best, large, has" in high.output
    assert not out.exists()
    small = planned(data, out, "--min-quality", 89, "--gpus", 2)
    assert small.returncode == 3
    assert "80 GB for its" in " ".join(small.output.split())
    assert planned(data, out).returncode == 2
    assert planned(data, out, "--min-quality", 80, "--goal", "rate").returncode == 2
    assert planned(data, out, "--min-quality", 80, "--goal", "speed").returncode == 2
    assert "dispatch: must be" in planned(data, out, "--min-quality", 80, dispatch="random").output
    assert "the cluster has 32" in planned(data, out, "--min-quality", 80, "--gpus", 33).output
    assert "models, trace, quality missing" in run("plan", "--cluster", CLUSTER).output
    demand = draw_demand(read_quality(data[1], TIERS), read_trace(data[0]).arrival_s[:50], seed=3)
    with pytest.raises(Unreachable, match="the least is"):
        plan_cascade(site, demand, max_latency_s=0.001)


def test_a_plan_as_the_mesh_follows_it_sends_nobody_where_nobody_is() -> None:
    """Tiers without instances are passed over, and the last one that has some lets everything stand."""
    for thresholds, instances, said in (
        ((70.0, 60.0), (2, 1, 1), (70.0, 60.0)),
        ((70.0, None), (2, 0, 1), (70.0, 100.0)),
        ((70.0, 101.0), (2, 0, 1), (70.0, 100.0)),
        ((70.0, 60.0), (2, 1, 0), (70.0, 0.0)),
        ((11.0, 0.0), (4, 0, 0), (0.0, 100.0)),
        ((None, None), (0, 0, 3), (100.0, 100.0)),
    ):
        assert mesh_tiers(thresholds, instances) == list(zip((*said, None), instances, strict=True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arrival_s,input_tokens,output_tokens\n", "no rows"),
        ("arrival_s,input_tokens\n1,2\n", "line 1: no column output_tokens"),
        ("arrival_s,input_tokens,output_tokens\n0,5,5\n1,x,5\n", "line 3: input_tokens 'x' is not a number"),
        ("arrival_s,input_tokens,output_tokens\n0,5,\n", "line 2: output_tokens is missing"),
        ("arrival_s,input_tokens,output_tokens\n0,0,5\n", "line 2: input_tokens must be a whole number from 1"),
        ("arrival_s,input_tokens,output_tokens\n0,1.5,5\n", "line 2: input_tokens must be a whole number"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,5\n", "line 2: arrival_s 'nan' is not a number"),
    ],
)
def test_a_bad_trace_is_named_by_line_and_column(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(FileError, match=said):
        read_trace(path)


def test_bad_scores_and_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    head = "input_tokens,a_output_tokens,a_judge_score\n"
    for text, said in (
        (head + "5,5,101\n", "line 2: a_judge_score must be from 0 to 100"),
        (head + "5,5,\n", "line 2: a_judge_score is missing"),
        ("input_tokens\n5\n", "no column a_output_tokens, a_judge_score"),
    ):
        path.write_text(text)
        with pytest.raises(FileError, match=said):
            read_quality(path, ("a",))
    with pytest.raises(FileError, match="no\\.csv"):
        read_trace(tmp_path / "no.csv")
    bad = tmp_path / "bad.yaml"
    for text, said in (
        ("gpu: h101\nnodes: 1\ngpus_per_node: 8\n", "no 'h101' in the catalogue"),
        ("gpu: h100\nnodes: 0\ngpus_per_node: 8\n", "nodes"),
        ("gpu: h100\nnodes: 1\ngpus_per_node: 8\ncolour: red\n", "colour"),
        ("gpu: [", "no YAML"),
    ):
        bad.write_text(text)
        with pytest.raises((FileError, InvalidRequest), match=said):
            read_site(bad, MODELS)
    bad.write_text("tiers:\n- {name: a, model: gpt-5}\n")
    with pytest.raises(InvalidRequest, match="no 'gpt-5' in the catalogue"):
        read_site(CLUSTER, bad)
    bad.write_text("tiers:\n- {name: a, model: qwen3-4b}\n- {name: a, model: qwen3-8b}\n")
    with pytest.raises(InvalidRequest, match="names are distinct"):
        read_site(CLUSTER, bad)
    assert run("simulate", "--plan", tmp_path / "q.csv", "--trace", path).returncode == 2


@pytest.mark.slow
def test_measured_replicas_take_the_place_of_the_roofline(data: tuple[Path, Path], tmp_path: Path, site: Site) -> None:
    """A tier with a profile is planned with it: ten times the roofline's step time shows in the plan."""
    plain = present(site.replica(2, ReplicaShape(8, 1), 2000)[0])
    slow = StepLatencyModel(plain.latency.knot_tokens, tuple(10 * s for s in plain.latency.knot_s))
    replica = dataclasses.replace(plain, latency=slow)
    write_profile(tmp_path / "large.json", Profile("large", "torch", "here", replica, ((StepLoad(1, 1), 0.1),), 0.0))
    models = tmp_path / "models.yaml"
    content = yaml.safe_load(MODELS.read_text())
    content["tiers"][2]["profiles"] = ["large.json"]
    models.write_text(yaml.safe_dump(content))
    measured = read_site(CLUSTER, models)
    assert [r.shape for r in replica_kinds(measured, 2, 32, 2000)[0]] == [ReplicaShape(8, 1)]
    assert measured.replica(2, ReplicaShape(4, 1), 10)[1] == "large has no profile for TP=4"
    assert "a request has" in measured.replica(2, ReplicaShape(8, 1), 10**9)[1]
    demand = draw_demand(read_quality(data[1], TIERS), read_trace(data[0]).arrival_s[:100], seed=3)
    fast, late = (plan_cascade(where, demand, min_quality=86) for where in (site, measured))
    assert late.latency_p95_s > 2 * fast.latency_p95_s
    content["tiers"][2]["profiles"] = ["none.json"]
    models.write_text(yaml.safe_dump(content))
    with pytest.raises(FileError, match=r"none\.json"):
        read_site(CLUSTER, models)


@pytest.mark.slow
def test_a_sweep_of_gpus(data: tuple[Path, Path], tmp_path: Path) -> None:
    small = (*inputs(data), *asked(requests=100, runs=0, **LARGEST_TIER), "--min-quality", 70)
    out = tmp_path / "sweep.json"
    done = run("plan", *small, "--sweep", "gpus=2,16", "--out", out, "--plot")
    assert done.returncode == 0, done.output
    points = json.loads(out.read_text())["points"]
    assert [point["value"] for point in points] == [2, 16]
    assert points[1]["feasible"]
    assert points[1]["cost"]["gpus"] <= 16
    assert out.with_suffix(".png").stat().st_size > 10_000
    for text, problem in (("colour", "--sweep must be"), ("rate=a", "must be numbers"), ("gpus=0", "at least 1")):
        assert problem in run("plan", *small, "--sweep", text).output


def test_a_target_that_cannot_be_met_is_json_too(data: tuple[Path, Path]) -> None:
    how = (*inputs(data), *asked(requests=100, runs=0, **LARGEST_TIER))
    done = run("plan", *how, "--min-quality", 99, "--json")
    assert done.returncode == 3
    said = json.loads(done.stdout)
    assert (said["feasible"], said["binds"]) == (False, "min_quality")
    assert said["nearest"]["min_quality"] < 99
    met = run("plan", *how, "--min-quality", said["nearest"]["min_quality"] - 0.01, "--json")
    assert met.returncode == 0
    assert json.loads(met.stdout)["verdict"]
