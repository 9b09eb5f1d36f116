"""Early checks where cascades are simulated and planned: what they cut, where answers then go, and plans with them."""

import asyncio
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider

from penstock.planner_service.codecs.plan_file import read_plan
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.files import FileError, read_quality
from penstock.planner_service.question.planning_options import Goal
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade, simulate_cascade
from penstock.planner_service.routing.end_to_end import least_felt_s
from penstock.planner_service.routing.grading import Grading
from penstock.planner_service.routing.grid import Grid
from penstock.planner_service.routing.quality import JudgedSample, PartScores, all_qualities, route
from penstock.planner_service.rules.early_rules import checking, fitted_rules, meanwhile_tokens, outcomes_of
from penstock.planner_service.simulator import Dispatch, EngineLimits, Replica
from penstock.router_service.generation.early_rejection import EarlyCheckCounter, EarlyRejection
from penstock.services.acceptance.early_checks import checked_answers, rejected_early
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ClusterSpec, GpuSpec, ModelSpec, ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.planning import Objective
from penstock.types.rules import AcceptanceRules, EarlyCheck, PlannedEarlyChecks
from tests.conftest import ROOT
from tests.support.cli import penstock as run
from tests.support.plain_plans import plain_options, plan_cascade
from tests.support.present import present
from tests.support.questions import asked
from tests.support.tables import write_judged, write_trace

TIERS, AFTER = ("small", "medium", "large"), (8, 16)
STEP_MS, JUDGE_S, WORKERS = (1.0, 3.0, 10.0), 0.0045, 4
RULES = (PlannedEarlyChecks((EarlyCheck(8, 30.0), EarlyCheck(16, 45.0)), 4), PlannedEarlyChecks())


def site(judge_s: float = JUDGE_S) -> Site:
    """Tiers whose steps take 1, 3 and 10 ms, whatever is in them."""
    replicas = tuple(
        (Replica(ReplicaShape(1, 1), StepLatencyModel.linear(ms / 1000, 0.0, 0.0), 32_768, EngineLimits(32)),)
        for ms in STEP_MS
    )
    model = ModelSpec("model", 2, 64, 4, 2, 16, 1e6, 1e6, 2.0, 256.0)
    cluster = ClusterSpec(GpuSpec("worker", 64e9, 1e10, 1e11, 1e10, 0.6, 0.8), 1, WORKERS, 1e10)
    return Site(cluster, TIERS, (model,) * 3, judge_s=judge_s, measured=replicas)


def sample(seed: int = 1, count: int = 300) -> JudgedSample:
    """The smaller a tier, the more of its answers are bad; bad ones are long, and their parts have low scores, too."""
    rng = np.random.default_rng(seed)
    good = rng.random((count, 3)) < (0.45, 0.75, 0.97)
    scores = np.where(good, rng.uniform(80, 100, good.shape), rng.uniform(0, 20, good.shape))
    outputs = np.where(good, rng.integers(5, 30, good.shape), rng.integers(40, 120, good.shape))
    parts = np.stack([np.minimum(100, scores + rng.uniform(0, spread, good.shape)) for spread in (40, 20)], axis=2)
    parts[outputs[:, :, None] <= np.array(AFTER)] = np.nan
    return JudgedSample(TIERS, rng.integers(10, 50, count), outputs, scores, parts=PartScores(AFTER, parts))


def demand(judged: JudgedSample, rate: float = 20.0) -> Demand:
    return Demand(judged, judged, np.arange(len(judged)) / rate)


STRATEGIES = [
    Strategy(((replicas[0], count),), 0.0) for replicas, count in zip(site().measured, (1, 1, 2), strict=True)
]


def test_what_is_rejected_has_the_tokens_until_its_verdict_and_goes_on() -> None:
    """One prompt after another by the routers' own rule, at any threshold, 0 included."""
    judged = sample()
    checked = judged.under(AcceptanceRules(early_checks=RULES))
    for thresholds in ((50.0, 50.0), (0.0, 0.0), (101.0, 30.0)):
        routed = route(checked, thresholds)
        for i in range(len(judged)):
            part = [None if np.isnan(score) else float(score) for score in present(judged.parts).scores[i, 0]]
            whole = int(judged.output_tokens[i, 0])
            first = next(
                (
                    check
                    for check, score in zip(RULES[0].checks, part, strict=True)
                    if rejected_early(check, score) and check.after_tokens + 4 < whole
                ),
                None,
            )
            assert checked.output_tokens[i, 0] == (whole if first is None else first.after_tokens + 4)
            assert present(checked.rejected_early)[i].tolist() == [first is not None, False, False]
            if thresholds[0] <= 100:
                assert (routed.answered[i] == 0) == (first is None and judged.scores[i, 0] >= thresholds[0])
            assert routed.processed[0, i] == (thresholds[0] <= 100)
    assert present(checked.rejected_early).any()
    assert (checked.output_tokens[:, 1:] == judged.output_tokens[:, 1:]).all()


@pytest.mark.parametrize(
    ("checks", "meanwhile", "scores", "length", "tokens", "parts"),
    [
        ((8,), 4, (10,), 12, None, 1),  # the answer ends before its verdict: it is judged whole
        ((8,), 4, (10,), 13, 12, 1),
        ((8, 10, 12), 20, (90, 10, 90), 60, None, 2),  # 10 and 12 come due while 8 is scored: only the last is made
        ((8, 10, 12), 20, (90, 90, 10), 60, 48, 2),
        ((8, 10, 12), 20, (90, 90, 10), 28, None, 1),
        ((8, 10, 12), 0, (90, 10, 10), 60, 10, 2),
        ((8, 10, 12), 1, (90, 90, 10), 12, None, 2),  # it has no more tokens than the last check is due after
    ],
)
def test_checks_that_come_due_while_a_part_is_scored_are_passed_over(
    checks: tuple[int, ...], meanwhile: int, scores: tuple[int, ...], length: int, tokens: int | None, parts: int
) -> None:
    rule = PlannedEarlyChecks(tuple(EarlyCheck(after, 50.0) for after in checks), meanwhile)
    checked = checked_answers(rule, checks, np.array([scores], float), np.array([length]))
    assert (checked.rejected[0], checked.tokens[0]) == (tokens is not None, tokens or length)
    assert checked.parts[0] == parts


@pytest.mark.parametrize("seed", range(5))
def test_the_grid_of_all_thresholds_knows_what_is_rejected(seed: int) -> None:
    checked, rng = sample(seed, 80).under(AcceptanceRules(early_checks=RULES)), np.random.default_rng(seed)
    levels, qualities = all_qualities(checked)
    for a, b in rng.integers(0, [len(level) for level in levels], (30, 2)):
        assert qualities[a, b] == pytest.approx(route(checked, (levels[0][a], levels[1][b])).quality)


def test_rejection_takes_the_time_of_a_part_and_its_verdict() -> None:
    """A request alone: 8 tokens and 4 more while they are scored on the small tier, then the medium one; judged once less.

    The medium tier, from which none escalates, accepts all without a judge.
    """
    one = JudgedSample(
        TIERS,
        np.array([1]),
        np.array([[50, 20, 10]]),
        np.array([[5.0, 90.0, 95.0]]),
        parts=PartScores(AFTER, np.array([[[20.0, 10.0], [95.0, 95.0], [np.nan, np.nan]]])),
    )
    seconds = {
        name: float(simulate_cascade(site(), demand(routed), (50.0, 50.0), STRATEGIES, Dispatch.CAPACITY)[1][0])
        for name, routed in (("whole", one), ("checked", one.under(AcceptanceRules(early_checks=RULES))))
    }
    assert seconds["whole"] == pytest.approx(0.050 + JUDGE_S + 0.060)
    assert seconds["checked"] == pytest.approx(0.012 + 0.060)


def test_rules_are_fitted_to_the_prompts_that_reach_a_tier_and_their_effect_is_counted() -> None:
    judged = sample(count=2000)
    rules = fitted_rules(site(), judged, (50.0, 50.0), 0.02)
    assert [bool(rule.checks) for rule in rules] == [True, True]
    assert [rule.meanwhile_tokens for rule in rules] == [4, 1]  # in 4.5 ms, at 1 and 3 ms per token
    assert fitted_rules(site(), judged, (101.0, 50.0), 0.02)[0] == PlannedEarlyChecks()  # the tier is not used
    checked, whole = judged.under(AcceptanceRules(early_checks=tuple(rules))), route(judged, (50.0, 50.0))
    for tier, outcome in enumerate(outcomes_of(judged, rules, (50.0, 50.0))):
        rows = route(checked, (50.0, 50.0)).processed[tier]
        stands = judged.scores[rows, tier] >= 50
        assert present(outcome.error) == pytest.approx(present(checked.rejected_early)[rows, tier][stands].mean())
        assert present(outcome.error) <= 0.02 + 0.01
        assert present(outcome.rejected) > 0.9
        assert 0.3 < outcome.saved < 0.9
        assert 0.5 < outcome.scored < 2
    assert route(checked, (50.0, 50.0)).processed[2].sum() >= whole.processed[2].sum()


def test_no_plan_is_faster_than_the_bound() -> None:
    """The least that users can feel bounds the simulated cascade from below, with and without checks."""
    for seed in range(4):
        for judged in (sample(seed, 60), sample(seed, 60).under(AcceptanceRules(early_checks=RULES))):
            alone_s = np.array([ms / 1000 * judged.output_tokens[:, t] for t, ms in enumerate(STEP_MS)])
            grid = Grid(judged)
            for point in list(grid.at_least(0.0))[:: max(1, grid.qualities.size // 25)]:
                bound = least_felt_s(grid, [point], judged, alone_s, JUDGE_S, 95)
                felt = simulate_cascade(
                    site(), demand(judged, 1.0), grid.thresholds(point), STRATEGIES, Dispatch.CAPACITY
                )
                assert present(bound) <= np.percentile(felt[1], 95) + 1e-9


def test_a_plan_with_early_checks_is_better_where_bad_answers_are_long() -> None:
    offered = demand(sample(), 40.0)
    options = plain_options(min_quality=90.0, goal=Goal.LATENCY, objective=Objective.END_TO_END)
    plain = plan_cascade(site(), offered, options)
    checked = plan_cascade(site(), offered, options, early_error=0.02)
    assert checked.felt_s < plain.felt_s
    assert checked.quality >= 90
    assert any(rule.checks for rule in checked.rules.early_checks)
    replayed = offered.under(checked.rules)
    strategies = [tier.strategy for tier in checked.tiers]
    total_s = simulate_cascade(site(), replayed, checked.thresholds, strategies, checked.dispatch)[1]
    assert np.percentile(total_s, 95) == pytest.approx(checked.end_to_end_p95_s)


def test_a_plan_keeps_the_stated_error_though_other_prompts_reach_the_checked_tier() -> None:
    """Easy prompts whose answers begin tersely reach the medium tier only where the small one is passed over."""
    rng = np.random.default_rng(51)
    easy = rng.random(200) < rng.uniform(0.3, 0.7)
    small = easy & (rng.random(200) < 0.95)
    medium = rng.random(200) < np.where(easy, 0.95, rng.uniform(0.4, 0.8))
    good = np.stack([small, medium, np.ones(200, bool)], 1)
    scores = np.where(good, rng.uniform(80, 100, good.shape), rng.uniform(0, 30, good.shape))
    outputs = np.where(good, rng.integers(20, 60, good.shape), rng.integers(60, 200, good.shape))
    parts = np.minimum(100, scores + rng.uniform(0, 20, good.shape))
    parts[:, 1] = np.where(easy & medium, rng.uniform(30, 50, 200), parts[:, 1])
    parts[:, 0] = np.nan
    judged = JudgedSample(TIERS, np.full(200, 20), outputs, scores, parts=PartScores((8,), parts[:, :, None]))
    options = plain_options(min_quality=85.0, goal=Goal.LATENCY, objective=Objective.LARGEST_TIER)
    plain = plan_cascade(site(), demand(judged, 60.0), options)
    fitted = fitted_rules(site(), judged, plain.thresholds, 0.03)
    without_small = (101.0, plain.thresholds[1])
    assert any((outcome.error or 0) > 0.1 for outcome in outcomes_of(judged, fitted, without_small)), "why it matters"
    for rate in (20.0, 60.0):
        plan = plan_cascade(site(), demand(judged, rate), options, early_error=0.03)
        assert all((outcome.error or 0) <= 0.03 for outcome in plan.rules.early_checks), (rate, plan.thresholds)
        assert plan.rules.early_checks or plan.early_reason


def test_answers_that_are_rejected_early_are_not_graded() -> None:
    grading = Grading(2)
    strategies = [Strategy(((replicas[0], WORKERS),), 0.0) for replicas in site().measured]
    judged = sample(count=120)
    graded = dataclasses.replace(site(judge_s=0.0), grading=grading)
    runs = {
        name: run_cascade(graded, demand(of, 5.0), (50.0, 50.0), strategies, Dispatch.CAPACITY)
        for name, of in (("whole", judged), ("checked", judged.under(AcceptanceRules(early_checks=RULES))))
    }
    rejected = present(judged.under(AcceptanceRules(early_checks=RULES)).rejected_early)
    reports = {name: run.grading for name, run in runs.items()}
    processed = route(judged.under(AcceptanceRules(early_checks=RULES)), (50.0, 50.0)).processed
    assert present(reports["checked"]).requests == processed[:-1].sum() - rejected[:, 0].sum()
    assert present(reports["checked"]).requests < present(reports["whole"]).requests
    assert runs["checked"].total_s[rejected[:, 0]].mean() < runs["whole"].total_s[rejected[:, 0]].mean()


@pytest.mark.parametrize("seed", range(3))
def test_thresholds_are_not_lowered_where_checks_would_then_reject_what_stands(seed: int) -> None:
    judged, error = sample(seed), 0.05
    plain = (62.0, 55.0)
    rules = fitted_rules(site(), judged, plain, error)
    checked = checking(judged, rules, plain)
    assert all(rule.checks for rule in rules)
    assert (checked.levels(0) == [62.0, *sorted({s for s in judged.scores[:, 0] if s > 62.0}), 101.0]).all()
    one = checking(judged, (rules[0], PlannedEarlyChecks()), plain)
    assert (one.levels(1) == judged.levels(1)).all()
    levels, qualities = all_qualities(checked.subset(np.arange(0, len(judged), 2)))
    assert [level[0] for level in levels] == [62.0, 55.0]
    assert qualities.shape == tuple(len(level) for level in levels)
    first = present(outcomes_of(judged, rules, (0.0, 55.0))[0].error)
    assert first > 5 * error  # why: by threshold 0 everything stands


def test_a_plan_that_is_no_better_with_checks_has_none_and_says_why() -> None:
    judged = sample()
    untold = dataclasses.replace(
        judged, parts=PartScores(AFTER, np.where(np.isnan(present(judged.parts).scores), np.nan, 50.0))
    )
    options = plain_options(min_quality=90.0, goal=Goal.LATENCY)
    plan = plan_cascade(site(), demand(untold), options, early_error=0.02)
    assert plan.rules.early_checks == ()
    assert "none rejects anything" in plan.early_reason
    assert plan.thresholds == plan_cascade(site(), demand(untold), options).thresholds


def test_bad_input_is_named() -> None:
    judged, options = sample(), plain_options(min_quality=90.0)
    bare = JudgedSample(TIERS, judged.input_tokens, judged.output_tokens, judged.scores)
    with pytest.raises(InvalidRequest, match="early_error: needs scores of unfinished answers"):
        plan_cascade(site(), demand(bare), options, early_error=0.02)
    with pytest.raises(InvalidRequest, match="need scores of unfinished answers"):
        bare.under(AcceptanceRules(early_checks=RULES))
    with pytest.raises(InvalidRequest, match="no scores of answers after 5 tokens"):
        judged.under(AcceptanceRules(early_checks=(PlannedEarlyChecks((EarlyCheck(5, 1.0),)), PlannedEarlyChecks())))
    with pytest.raises(InvalidRequest, match="2 rules, not 1"):
        judged.under(AcceptanceRules(early_checks=RULES[:1]))
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"early_error": 0.0}, "early_error: must be over 0 and less than 1"),
        ({"early_error": 0.02, "max_tiers": 2}, "early_error: goes without max_tiers"),
    )
    for more, said in refused:
        with pytest.raises(InvalidRequest, match=said):
            plan_cascade(site(), demand(judged), options, **more)
    assert meanwhile_tokens(site(judge_s=0.0), 0, judged) == 0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A quality file with scores of parts, as `penstock measure --early-after` writes it, and a trace."""
    folder, rng, judged = tmp_path_factory.mktemp("early"), np.random.default_rng(3), sample(count=400)
    paths = {name: folder / name for name in ("judged.csv", "trace.csv")}
    write_judged(paths["judged.csv"], judged)
    write_trace(paths["trace.csv"], ((f"{at:.4f}", 30, 60) for at in np.cumsum(rng.exponential(0.02, 400))))
    return paths


def plan(files: dict[str, Path], *more: object, **fields: Any) -> Any:
    examples = ROOT / "examples"
    given = ("--cluster", examples / "cluster-1x8-h100.yaml", "--models", examples / "qwen2.5-cascade.yaml")
    work = (
        "--trace",
        files["trace.csv"],
        "--quality",
        files["judged.csv"],
        *asked(requests=200, runs=0, confidence=0.5, **fields),
    )
    return run("plan", *given, *work, "--min-quality", 90, "--goal", "latency", *more)


def test_parts_are_read_from_the_quality_file(files: dict[str, Path], tmp_path: Path) -> None:
    read, judged = read_quality(files["judged.csv"], TIERS), sample(count=400)
    assert present(read.parts).after_tokens == AFTER
    assert present(read.parts).scores == pytest.approx(present(judged.parts).scores, rel=1e-4, nan_ok=True)
    bad = tmp_path / "bad.csv"
    bad.write_text(files["judged.csv"].read_text().replace("small_score_after_8", "small_score_after_0"))
    assert read_quality(bad, TIERS).parts is not None  # the column of the small tier is none: it has no parts after 8
    base = "input_tokens,small_output_tokens,small_judge_score"
    bad.write_text(f"{base},small_score_after_8\n10,8,50,40\n")
    with pytest.raises(FileError, match="line 2: small_score_after_8: the answer has no more than 8 tokens"):
        read_quality(bad, ("small",))
    many = ",".join(f"small_score_after_{tokens}" for tokens in range(1, 18))
    bad.write_text(f"{base},{many}\n10,80,50{',40' * 17}\n")
    with pytest.raises(FileError, match="17 columns score_after_N of a tier, at most 16"):
        read_quality(bad, ("small",))
    for tokens in ("9" * 5000, "2147483648"):
        bad.write_text(f"{base},small_score_after_{tokens}\n10,80,50,40\n")
        with pytest.raises(
            FileError, match=r"bad.csv: line 1: score_after_N of a tier must be of at most 2,147,483,647"
        ):
            read_quality(bad, ("small",))
    lines = files["judged.csv"].read_text().splitlines()
    cells = lines[1].split(",")
    cells[3] = "101"
    bad.write_text("\n".join([lines[0], ",".join(cells)]))
    with pytest.raises(FileError, match="line 2: small_score_after_8 must be from 0 to 100"):
        read_quality(bad, TIERS)


@pytest.mark.slow
def test_a_plan_file_has_the_checks_and_is_replayed_with_them(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    made = plan(files, "--out", out, rules={"early_error": 0.02})
    assert made.returncode == 0, made.output
    figures = json.loads(out.read_text())
    assert figures["early_checks"] is not None, figures["early_reason"]
    assert "early checks of small" in made.output
    first = figures["early_checks"][0]
    assert first["checks"][0].keys() == {"after_tokens", "reject_below"}
    assert first["rejected"] > 0.6
    without = tmp_path / "without.json"
    assert plan(files, "--out", without).returncode == 0
    assert figures["workload_digest"] == json.loads(without.read_text())["workload_digest"]
    read = [tier.early_checks for tier in read_plan(out).plan.tiers[:-1]]
    assert [None if one is None else dataclasses.asdict(one)["checks"] for one in read] == [
        tuple(one["checks"]) for one in figures["early_checks"]
    ]
    replayed = {}
    for name, content in (("with", figures), ("without", figures | {"early_checks": None})):
        out.write_text(json.dumps(content))
        result = run("simulate", "--plan", out, "--trace", files["trace.csv"], "--json")
        assert result.returncode == 0, result.output
        replayed[name] = json.loads(result.stdout)["tiers"][0]["latency_s"]["mean"]
    assert replayed["with"] < replayed["without"]
    for spoilt, said in (([first], "2 tiers, not 1"), ([first | {"meanwhile_tokens": -1}] * 2, "meanwhile_tokens")):
        out.write_text(json.dumps(figures | {"early_checks": spoilt}))
        refused = run("simulate", "--plan", out, "--trace", files["trace.csv"])
        assert (refused.returncode, said in refused.output) == (2, True), refused.output


def test_the_command_refuses_what_cannot_be_planned(files: dict[str, Path]) -> None:
    for more, said in (
        ({"rules": {"early_error": 0}}, "rules.early_error: must be over 0"),
        ({"rules": {"early_error": 0.02}, "max_tiers": 2}, "early_error: goes without max_tiers"),
        ({"rules": {"early_error": 0.02}, "lengths": "trace"}, "early_error: not with the lengths of the trace"),
    ):
        refused = plan(files, **more)
        assert (refused.returncode, said in " ".join(refused.output.split())) == (2, True), refused.output


COUNTER = EarlyCheckCounter(MeterProvider().get_meter("test"))


async def routed(rule: PlannedEarlyChecks, scores: list[float], length: int) -> tuple[int | None, int]:
    """(tokens when a router rejects an answer of `length` tokens, parts that it had scored). scores: by check."""
    tokens, due_at, asked = 0, 0, 0
    verdict = asyncio.Event()

    async def score() -> float | None:
        nonlocal due_at, asked
        known = [s for check, s in zip(rule.checks, scores, strict=True) if check.after_tokens <= tokens]
        due_at, asked = tokens + rule.meanwhile_tokens, asked + 1
        if rule.meanwhile_tokens:
            verdict.clear()
            await verdict.wait()
        return None if math.isnan(known[-1]) else known[-1]

    early = EarlyRejection("small", rule.checks, score, COUNTER)
    rejecting = asyncio.ensure_future(early.rejecting_score())
    try:
        for tokens in range(1, length):  # with the last token the answer is finished
            early.has(tokens)
            if tokens == due_at:
                verdict.set()
            for _ in range(9):
                await asyncio.sleep(0)
            if rejecting.done() and rejecting.result() is not None:
                return tokens, asked
        return None, asked
    finally:
        rejecting.cancel()


@pytest.mark.parametrize("seed", range(40))
async def test_an_answer_is_cut_where_a_router_cuts_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    after = sorted(rng.choice(np.arange(1, 30), int(rng.integers(1, 5)), replace=False).tolist())
    rule = PlannedEarlyChecks(tuple(EarlyCheck(tokens, 50.0) for tokens in after), int(rng.integers(0, 15)))
    scores = np.where(rng.random(len(after)) < 0.1, np.nan, rng.uniform(30, 100, len(after))).tolist()
    length = int(rng.integers(1, 40))
    known = [score if tokens < length else math.nan for tokens, score in zip(after, scores, strict=True)]
    checked = checked_answers(rule, after, np.array([known]), np.array([length]))
    at, asked = await routed(rule, scores, length)
    assert (at or length, at is not None, asked) == (checked.tokens[0], checked.rejected[0], checked.parts[0])
