"""Judging as a load of the tier or judge model that does it: simulation, search, files, plans from end to end."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.brute_force import instance, wanted_quality
from penstock.cli.main import app
from penstock.judge_service.scorers.llm.grading import grade_question
from penstock.judge_service.scoring.questions import REPLY_TOKENS as JUDGES_REPLY_TOKENS
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.planning.deployers import deployer_for
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.replay.slo_classes import WorkloadClass
from penstock.planner_service.replay.slo_simulation import simulate_slos
from penstock.planner_service.replay.sustained_load import JUDGE, sustained_load
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.goals import cheapest
from penstock.planner_service.routing.grading import QUESTION_TOKENS, REPLY_TOKENS, Arrivals, Grading, tier_load
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import Dispatch, EngineLimits, Replica
from penstock.planner_service.simulator.tier import alone_times, assign, serve
from penstock.question_files.errors import FileError
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.prompts import TextPrompt
from penstock.types.rules import AcceptanceRules
from tests.support.hard_prompts import TIERS, demand_at, plan_arguments
from tests.support.inputs import read_site
from tests.support.plain_plans import plan_cascade
from tests.support.present import present
from tests.support.questions import asked

BY_LARGE = {"tier": "large"}
THRESHOLDS = (65.0,)
LIMIT_S = 12.0


def by_model(replicas: int) -> dict[str, Any]:
    """A judge that takes about 25 ms for an answer: one process keeps up with 40 requests per second, but not at 75 %."""
    return {"model": "judge", "replicas": replicas, "pass_s": 0.005, "token_s": 2e-5}


def site_of(folder: Path, judge: dict[str, Any] | None = None, **more: Any) -> Site:
    (folder / "cluster.yaml").write_text(yaml.safe_dump({"gpu": "h100", "nodes": 4, "gpus_per_node": 8}))
    models = {
        "tiers": [{"name": "small", "model": "qwen2.5-1.5b"}, {"name": "large", "model": "qwen2.5-72b"}],
        **({} if judge is None else {"judge": judge}),
        **more,
    }
    (folder / "models.yaml").write_text(yaml.safe_dump(models))
    return read_site(folder / "cluster.yaml", folder / "models.yaml")


def lowest_rejected(demand: Demand) -> tuple[float]:
    """The threshold that rejects the fewest answers of the small tier, but some."""
    return (float(demand.requests.scores[:, 0].min()) + 1e-6,)


def planned_strategies(site: Site, demand: Demand) -> list[Strategy]:
    deployer, _ = deployer_for(site, demand, gpus=None, dispatch=Dispatch.CAPACITY, max_utilisation=0.75)
    deployment = present(deployer.cheapest_within(THRESHOLDS, LIMIT_S))
    return list(deployment.strategies)


@pytest.mark.slow
def test_a_tier_that_grades_needs_more(tmp_path: Path) -> None:
    """For the same routing, latency and rate, the tier that grades takes more GPUs and is busier; the other does not."""
    demand = demand_at(20.0)
    plain, grading = site_of(tmp_path), site_of(tmp_path, BY_LARGE)
    without, with_grades = planned_strategies(plain, demand), planned_strategies(grading, demand)
    assert with_grades[0].gpus == without[0].gpus
    assert with_grades[1].gpus > without[1].gpus
    processed = route(demand.requests, THRESHOLDS).processed
    how = (demand.requests, demand.arrival_s, processed, without, Dispatch.CAPACITY)
    loads = [present(sustained_load(*how, site.grading)) for site in (plain, grading)]
    assert loads[1].utilisation[0] == loads[0].utilisation[0]
    assert loads[1].utilisation[1] > 1.3 * loads[0].utilisation[1], "more than half of the answers are graded besides"
    assert loads[1].sustained_per_s < loads[0].sustained_per_s
    runs = [run_cascade(site, demand, THRESHOLDS, without, Dispatch.CAPACITY) for site in (plain, grading)]
    assert runs[0].grading is None
    assert np.percentile(runs[1].total_s, 95) > np.percentile(runs[0].total_s, 95)
    assert runs[1].reports[1].latency_s.p95 > runs[0].reports[1].latency_s.p95, "grades go first"
    assert runs[1].reports[1].requests == runs[0].reports[1].requests, "of the tier's own requests"


def test_what_is_graded_follows_from_thresholds_and_skipping(tmp_path: Path) -> None:
    """Every answer of a tier but the last is graded once: none of tiers that are passed over, by threshold or prediction, and
    none of one that accepts all."""
    site, demand = site_of(tmp_path, BY_LARGE), demand_at(20.0)
    strategies = planned_strategies(site, demand)
    skipping = demand.under(AcceptanceRules(skip_below=(50.0,)))
    for case, thresholds in ((demand, THRESHOLDS), (demand, (0.0,)), (demand, (101.0,)), (skipping, THRESHOLDS)):
        grading = present(run_cascade(site, case, thresholds, strategies, Dispatch.CAPACITY).grading)
        expected = 0 if thresholds == (0.0,) else int(route(case.requests, thresholds).processed[:-1].sum())
        assert grading.requests == expected
        assert grading.requests_per_s == pytest.approx((demand.rate_per_s or 0.0) * expected / len(demand.requests))
        assert (grading.wait_s.p50 > 0) == (expected > 0)
    assert route(skipping.requests, THRESHOLDS).processed[0].sum() < len(demand.requests)


@pytest.mark.parametrize("judge", [BY_LARGE, by_model(2), {"tier": "small"}])
def test_rounds_settle(tmp_path: Path, judge: dict[str, Any]) -> None:
    """The rounds that are simulated are enough: twice as many change latencies by less than 3 %, which is noise."""
    site, demand = site_of(tmp_path, judge), demand_at(20.0)
    strategies = planned_strategies(site_of(tmp_path, BY_LARGE), demand)
    few = run_cascade(site, demand, THRESHOLDS, strategies, Dispatch.CAPACITY)
    many = run_cascade(site, demand, THRESHOLDS, strategies, Dispatch.CAPACITY, rounds=8)
    for percentile in (50, 95, 99):
        assert np.percentile(few.total_s, percentile) == pytest.approx(
            np.percentile(many.total_s, percentile), rel=0.03
        )
    assert present(few.grading).wait_s.p95 == pytest.approx(present(many.grading).wait_s.p95, rel=0.15)


@pytest.mark.parametrize("judge", [BY_LARGE, by_model(1)])
def test_without_load_a_grade_takes_what_it_takes_alone(tmp_path: Path, judge: dict[str, Any]) -> None:
    """Requests far apart: an answer waits as long as its grading request has the judge for itself, and judge_s."""
    site, demand = site_of(tmp_path, judge, judge_s=0.5), demand_at(0.01, 50)
    strategies = planned_strategies(site_of(tmp_path, BY_LARGE), demand)
    thresholds = lowest_rejected(demand)
    run = run_cascade(site, demand, thresholds, strategies, Dispatch.CAPACITY)
    requests, grading = demand.requests, present(site.grading)
    replica = grading.replicas[0] if grading.replicas else strategies[1].replicas[0][0]
    answers = tier_load(
        requests,
        grading.tier,
        Arrivals(np.zeros(0, np.int64), np.zeros(0)),
        grading,
        [(0, Arrivals(np.arange(len(requests)), demand.arrival_s))],
    ).work
    tokens = requests.input_tokens + requests.output_tokens[:, 0] + (QUESTION_TOKENS if grading.by_tier else 0)
    assert answers.input_tokens.tolist() == tokens.tolist()
    plain = run_cascade(
        dataclasses.replace(site, grading=None, judge_s=0.0), demand, thresholds, strategies, Dispatch.CAPACITY
    )
    np.testing.assert_allclose(run.total_s - plain.total_s, alone_times(answers, replica).finish_s + 0.5, rtol=1e-6)


def test_a_judge_model_must_keep_up(tmp_path: Path) -> None:
    """With too few processes, no routing that asks the small tier sustains the rate: the plan avoids it, or there is none."""
    demand = demand_at(40.0)
    targets: dict[str, Any] = {"min_quality": 76.0, "max_latency_s": LIMIT_S}
    few, enough = site_of(tmp_path, by_model(1)), site_of(tmp_path, by_model(2))
    plan = plan_cascade(enough, demand, **targets, max_utilisation=0.75)
    assert plan.tiers[0].gpus > 0
    strategies = [tier.strategy for tier in plan.tiers]
    processed = route(demand.requests, plan.thresholds).processed
    load = present(
        sustained_load(demand.requests, demand.arrival_s, processed, strategies, Dispatch.CAPACITY, few.grading)
    )
    assert load.tier == JUDGE
    avoiding = plan_cascade(few, demand, **targets, max_utilisation=0.75)
    assert avoiding.tiers[0].gpus == 0
    assert avoiding.gpus > plan.gpus
    with pytest.raises(Unreachable, match="the rate binds"):
        plan_cascade(few, demand, min_quality=76.0, max_latency_s=LIMIT_S, max_utilisation=0.75, gpus=plan.gpus)


def test_the_cheapest_is_brute_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 10 small instances of replicas that run one request at a time: over thresholds, splits and multisets."""
    monkeypatch.setattr("penstock.planner_service.deployment.search.PAIRS_TRIED", 100)
    feasible = differs = 0
    for seed in range(10):
        plain, sample = instance(seed, tiers=2 + seed % 2, count=5 + seed % 4, gpus=4)
        grading = Grading(seed % len(sample.tiers), question_tokens=60, reply_tokens=2)
        arrival_s = plain._traffic.arrival_s * 0.2
        kinds = [[dataclasses.replace(k, limits=EngineLimits(1, 256, 16)) for k in of_tier] for of_tier in plain.kinds]
        deployer = Deployer(sample, arrival_s, kinds, 4, grading=grading)
        alone = Deployer(sample, arrival_s, kinds, 4)
        limit_s = float(np.random.default_rng(seed).uniform(0.5, 4.0))
        best = brute_force_gpus(deployer, sample, wanted_quality(sample), limit_s)
        try:
            solution = cheapest(deployer, wanted_quality(sample), limit_s)
        except Unreachable:
            assert best == np.inf, seed
            continue
        feasible += 1
        assert sum(solution.deployment.gpus) == best, seed
        differs += best != brute_force_gpus(alone, sample, wanted_quality(sample), limit_s)
    assert feasible >= 3
    assert differs >= 1, "grading costs GPUs in some of them"


def brute_force_gpus(deployer: Deployer, sample: JudgedSample, min_quality: float, limit_s: float) -> float:
    """The fewest GPUs with which the p95 of every tier's own requests is within limit_s."""
    best = np.inf
    for thresholds in itertools.product(*(sample.levels(tier) for tier in range(len(sample.tiers) - 1))):
        routed = route(sample, thresholds)
        if routed.quality < min_quality - 1e-9:
            continue
        total = 0.0
        for tier in range(len(sample.tiers)):
            total += fewest_of_tier(deployer, sample, routed.processed, tier, limit_s)
        best = min(best, total)
    return best if best <= deployer.gpus else np.inf


def fewest_of_tier(deployer: Deployer, sample: JudgedSample, processed: Any, tier: int, limit_s: float) -> float:
    arrivals = [Arrivals(np.flatnonzero(rows), deployer._traffic.arrival_s[rows]) for rows in processed]
    rejecting = np.flatnonzero([(rows & processed[t + 1 :].any(axis=0)).any() for t, rows in enumerate(processed)])
    load = tier_load(sample, tier, arrivals[tier], deployer.grading, [(t, arrivals[t]) for t in rejecting.tolist()])
    if not len(load.work):
        return 0.0
    small, fast = deployer.kinds[tier]
    fewest = np.inf
    for n, m in itertools.product(range(deployer.gpus + 1), range(deployer.gpus // 2 + 1)):
        if n + m and n + 2 * m <= min(deployer.gpus, fewest - 1):
            served = serve(load.work, [small] * n + [fast] * m)
            seconds = (served.finish_s - load.work.arrival_s)[load.counted]
            if np.percentile(seconds, 95.0) <= limit_s:
                fewest = n + 2 * m
    return fewest


def test_sorts_of_requests_that_alternate_share_all_replicas() -> None:
    """Where every request is followed by a grade, two replicas get as many grades each."""
    priority, kinds = np.tile([0, 1], 50), np.zeros(2, np.int64)
    owner = assign(priority, kinds, np.ones(1), Dispatch.CAPACITY)
    for sort in (0, 1):
        assert np.bincount(owner[priority == sort]).tolist() == [25, 25]
    unlike = assign(priority, np.array([0, 1]), np.array([1.0, 3.0]), Dispatch.CAPACITY)
    assert np.bincount(unlike[priority == 1]).tolist() == pytest.approx([12.5, 37.5], abs=1)


def test_a_tier_that_only_grades_is_held_to_the_latency_of_its_grades() -> None:
    """Without requests of its own, what counts are the grades: l(f) falls with more GPUs, and is not 0."""
    plain, sample = instance(1, tiers=3, count=40, gpus=6)
    thresholds = float(np.median(sample.scores[:, 0])), 0.0
    deployer = Deployer(sample, plain._traffic.arrival_s * 0.1, plain.kinds, 6, grading=Grading(2, 20, 2))
    deployment = present(deployer.deploy(thresholds))
    assert deployment.gpus[2] > 0
    ungraded = Deployer(sample, plain._traffic.arrival_s * 0.1, plain.kinds, 6)
    alone_s = ungraded.times_s(thresholds, (*deployment.strategies[:2], Strategy((), 0.0)))[0]
    grades = deployer.times_s(thresholds, deployment.strategies)[0] - alone_s
    assert deployment.strategies[2].latency_s == pytest.approx(np.percentile(grades[0], 95.0))


def test_the_usual_tokens_are_those_of_the_judge() -> None:
    """The question's length, by four characters a token, and the room for a grade."""
    characters = sum(len(message["content"]) for message in grade_question(TextPrompt(""), ""))
    assert 0.6 * QUESTION_TOKENS <= characters / 4 <= QUESTION_TOKENS
    assert REPLY_TOKENS == JUDGES_REPLY_TOKENS


@pytest.mark.parametrize(
    ("judge", "problem"),
    [
        ({"tier": "medium"}, "judge.tier: 'medium' is none of the tiers: small, large"),
        ({}, "give either tier or model"),
        ({"tier": "large", "model": "judge", "token_s": 1e-5}, "give either tier or model"),
        ({"tier": "large", "replicas": 2}, "replicas: not with tier"),
        ({"model": "judge", "token_s": 1e-5, "reply_tokens": 4}, "reply_tokens: not with model"),
        ({"model": "judge"}, "token_s: is needed for a model"),
        ({"model": "judge", "token_s": 0}, "judge.token_s"),
        ({"model": "judge", "token_s": float("inf")}, "judge.token_s"),
        ({"model": "judge", "token_s": 1e-5, "replicas": 100_000}, "judge.replicas"),
        ({"tier": "large", "question_tokens": -1}, "question_tokens field: Value out of range"),
        ({"tier": "large", "reply_tokens": 10**9}, "judge.reply_tokens"),
        ({"tier": "large", "tokens": 1}, "judge.tokens"),
    ],
)
def test_bad_judges_are_refused(tmp_path: Path, judge: dict[str, Any], problem: str) -> None:
    with pytest.raises((FileError, InvalidRequest), match="judge") as caught:
        site_of(tmp_path, judge)
    assert problem in str(caught.value)


def test_a_single_tier_is_not_judged(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="judge: the answers of a single tier are not judged"):
        site_of(tmp_path, BY_LARGE, tiers=[{"name": "large", "model": "qwen2.5-72b"}])


def test_slos_are_refused_with_a_judges_load(tmp_path: Path) -> None:
    site, demand = site_of(tmp_path, BY_LARGE), demand_at(5.0, 30)
    classes = [WorkloadClass("chat", 2.0, 0.1, 1.0)]
    with pytest.raises(InvalidRequest, match=r"judge: is not simulated with SLOs"):
        simulate_slos(site, demand, THRESHOLDS, planned_strategies(site, demand), classes, 1)


def test_a_long_grading_request_needs_room() -> None:
    """A replica must hold the longest prompt with its answer, though the tier's own requests are short."""
    sample = JudgedSample(TIERS, np.array([100]), np.array([[900, 10]]), np.array([[10.0, 90.0]]))
    assert Grading(1, 50, 4).longest_tokens(sample) == 1054
    limits = EngineLimits(8, 256, 16)
    tight = Replica(ReplicaShape(1, 1), StepLatencyModel.linear(0.01, 1e-4, 0.0), 512, limits)
    wide = dataclasses.replace(tight, kv_tokens=2048)
    for kinds, fits in (([tight], False), ([tight, wide], True)):
        deployer = Deployer(sample, np.zeros(1), [[wide], kinds], 4, grading=Grading(1, 50, 4))
        assert (deployer.deploy((50.0,)) is not None) == fits
    assert Deployer(sample, np.zeros(1), [[wide], [tight]], 4).deploy((50.0,)) is not None


@pytest.mark.slow
def test_plans_show_what_judging_amounts_to(tmp_path: Path) -> None:
    """In the table, in the JSON, in the message and in the SDK; and a plan file is replayed with it."""
    site_of(tmp_path, by_model(1))
    options = ("--min-quality", "76", "--max-latency", "12", *asked(requests=200, runs=1))
    out = tmp_path / "plan.json"
    done = CliRunner().invoke(app, ["plan", *plan_arguments(tmp_path, demand_at(10.0)), *options, "--out", str(out)])
    assert done.exit_code == 0, done.output
    told = json.loads(out.read_text())["grading"]
    assert told["by"] == "judge"
    assert told["requests"] == 200
    assert told["wait_s"]["p95"] > 0
    assert f"judging: judge scores {told['requests_per_s']:.3g} answers/s" in " ".join(done.output.split())
    replayed = CliRunner().invoke(
        app, ["simulate", "--plan", str(out), "--trace", str(tmp_path / "trace.csv"), "--json"]
    )
    assert replayed.exit_code == 0, replayed.output
