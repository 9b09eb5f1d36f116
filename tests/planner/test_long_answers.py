"""Rules for long answers where they are planned: routing under a rule, plans, files, the service's calls, errors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.planner_service.codecs.plan_file import read_plan
from penstock.planner_service.question.demand import draw_demand
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.routing.solution import Proof
from penstock.planner_service.simulator import Dispatch
from penstock.question_files.errors import FileError
from penstock.services.acceptance.long_answers import LongAnswersAccepted
from penstock.types.planning import Objective
from penstock.types.rules import AcceptanceRules, LongAnswers
from tests.conftest import ROOT
from tests.support.cli import penstock
from tests.support.inputs import read_quality
from tests.support.judged_samples import judged_sample
from tests.support.plain_plans import plan_cascade
from tests.support.present import present
from tests.support.questions import asked, question, site_and_demand, with_prompts
from tests.support.sites import a100_site
from tests.support.two_tiers import two_tier_files


def test_what_a_guard_has_refused_is_no_long_answer() -> None:
    """As in the router: an answer that was cut off or repeats itself is long for that reason."""
    judged = judged_sample(6, count=80)
    refused = (judged.scores == 0) & (np.arange(len(judged))[:, None] % 2 == 0)
    with_reasons = dataclasses.replace(judged, refused=refused).under(
        AcceptanceRules(long_answers=(LongAnswers(1, 0.0), LongAnswers(1, 0.0)))
    )
    assert not present(with_reasons.long_enough)[refused].any()
    assert present(with_reasons.long_enough)[:, :2][~refused[:, :2]].all()


def test_refusals_come_from_files_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "judged.csv"
    header = "input_tokens,a_output_tokens,a_judge_score,b_output_tokens,b_judge_score,a_refused,b_refused"
    path.write_text(f"{header}\n5,9,0,9,80,1,0\n5,9,0,9,90,0,0\n")
    np.testing.assert_array_equal(read_quality(path, ("a", "b")).refused, [[True, False], [False, False]])
    path.write_text(f"{header}\n5,9,0,9,80,2,0\n")
    with pytest.raises(FileError, match="a_refused"):
        read_quality(path, ("a", "b"))
    asking = question()
    assert site_and_demand(asking)[1].judged.refused is None
    marked = with_prompts(asking, refused=[(i == 3, False, False) for i in range(100)])
    refused = present(site_and_demand(marked)[1].judged.refused)
    assert np.argwhere(refused).tolist() == [[3, 0]]


def long_answers_are_slow(seed: int, count: int = 400) -> tuple[Site, Demand]:
    """Two tiers whose answers are long for the same prompts, with scores that do not depend on length."""
    rng = np.random.default_rng(seed)
    length = rng.choice([40, 60, 900], count, p=[0.4, 0.4, 0.2])
    tokens = np.stack([length, length], axis=1)
    scores = np.stack([rng.integers(0, 101, count), np.full(count, 95)], axis=1).astype(np.float64)
    judged = JudgedSample(("small", "large"), rng.integers(20, 60, count), tokens, scores)
    arrival_s = np.cumsum(rng.exponential(0.2, count))
    return a100_site("llama-3.1-8b", "llama-3.1-70b"), draw_demand(judged, arrival_s, seed)


@pytest.mark.parametrize("objective", [Objective.END_TO_END, Objective.LARGEST_TIER])
def test_a_plan_with_a_rule_is_faster_at_the_same_quality(objective: Objective) -> None:
    """Where long answers escalate last, the slowest twentieth of requests is served by one tier. Replayed whole."""
    site, demand = long_answers_are_slow(1)
    plain = plan_cascade(site, demand, min_quality=75, objective=objective)
    plan = plan_cascade(site, demand, min_quality=75, objective=objective, long_answers=True)
    assert plain.rules.long_answers == ()
    (rule,) = plan.rules.long_answers
    assert rule is not None
    assert plan.quality >= 75
    assert plan.felt_s < 0.9 * plain.felt_s
    assert (plan.solution.proof, plan.solution.gap) == (Proof.SEARCHED, None)
    under = demand.under(plan.rules)
    assert route(under.judged, plan.thresholds).quality == plan.quality
    run = run_cascade(site, under, plan.thresholds, [t.strategy for t in plan.tiers], Dispatch.CAPACITY)
    if objective is Objective.END_TO_END:
        assert run.latency_s(objective, 95.0) == plan.felt_s


def test_rules_that_are_tried() -> None:
    """Each tells some answers of its tier from others."""
    judged = judged_sample(5, count=80)
    for tier in range(2):
        rules = LongAnswersAccepted().choices(judged, tier)
        assert rules
        for rule in rules:
            long = judged.output_tokens[:, tier] >= rule.from_tokens
            assert 0 < long.sum() < len(judged)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return two_tier_files(tmp_path_factory.mktemp("files"), long_answers_are_slow(1)[1], 200)


def planned(files: dict[str, Path], out: Path) -> Any:
    cluster = ROOT / "examples/cluster-1x8-h100.yaml"
    site = ("--cluster", cluster, "--models", files["models"], "--gpus", 4)
    work = (
        "--trace",
        files["trace"],
        "--quality",
        files["judged"],
        *asked(requests=200, runs=0, rules={"long_answers": True}),
    )
    return penstock("plan", *site, *work, "--min-quality", 75, "--no-plot", "--out", out)


@pytest.mark.slow
def test_a_plan_file_has_the_rule_and_is_replayed_and_rendered_with_it(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = planned(files, out)
    assert result.returncode == 0, result.output
    figures = json.loads(out.read_text())
    (rule,) = figures["long_answers"]
    assert (
        f"long answers accepted: small of {rule['from_tokens']} tokens from score {rule['threshold']:g}"
        in result.output
    )
    assert read_plan(out).plan.tiers[0].long_answers == LongAnswers(**rule)
    replayed = penstock("simulate", "--plan", out, "--trace", files["trace"], "--requests", 200, "--json")
    assert replayed.returncode == 0, replayed.output
    p95_s = json.loads(replayed.stdout)["end_to_end_s"]["p95"]
    without = figures | {"long_answers": None}
    out.write_text(json.dumps(without))
    plain = json.loads(
        penstock("simulate", "--plan", out, "--trace", files["trace"], "--requests", 200, "--json").stdout
    )
    assert p95_s < plain["end_to_end_s"]["p95"]
    out.write_text(json.dumps(figures))
    refused = penstock("simulate", "--plan", out, "--trace", files["trace"], "--requests", 200, "--lengths", "trace")
    assert refused.returncode == 2
    assert "lengths: must be those of the judged answers" in refused.output
    assert penstock("plan", "render", out, "--to", "compose").returncode == 0
    mesh = yaml.safe_load(out.with_suffix(".mesh.yaml").read_text())
    assert [tier.get("long_answers") for tier in mesh["tiers"]] == [rule, None]
    for wrong, field in (
        ([rule, rule], "long_answers: must be of 1 tiers"),
        ([rule | {"from_tokens": 0}], r"long_answers\[0\].from_tokens"),
        ([rule | {"threshold": 101}], r"long_answers\[0\].threshold"),
        ([rule | {"from_tokens": 2**40}], "from_tokens"),
        ([rule | {"from_tokens": 3.5}], "from_tokens"),
    ):
        out.write_text(json.dumps(figures | {"long_answers": wrong}))
        with pytest.raises(FileError, match=field):
            read_plan(out)
