"""Burst ladders where they are planned: each step, ties, plan files, commands, and a burst in virtual time."""

import dataclasses
import itertools
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.planner_service.api import strategies_of
from penstock.planner_service.codecs.plan_file import plan_to_json, read_plan
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.files import FileError, read_quality, read_site, read_trace
from penstock.planner_service.manifests.mesh_tiers import mesh_ladder
from penstock.planner_service.question.demand import demand_of, draw_demand
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.quality import SKIPPED, JudgedSample, route
from penstock.planner_service.rules.burst_ladder import (
    LEAST_GAIN,
    TIE_SHARES,
    NoLadder,
    burst_ladder,
    draws,
    expected,
    rules_below,
    tie_rule,
)
from penstock.planner_service.rules.burst_simulation import route_by_steps, simulate_bursts, steps_taken
from penstock.planner_service.simulator import Dispatch
from penstock.services.acceptance.bursts import tie_accepted
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ReplicaShape
from penstock.types.rules import AcceptanceRules, BurstLadder, BurstThreshold
from tests.conftest import ROOT
from tests.support.cli import penstock
from tests.support.plain_plans import plain_options, plan_cascade
from tests.support.questions import asked, question, site_and_demand

run = partial(penstock, columns=300)

EXAMPLES = ROOT / "examples"
FILES = ("--cluster", EXAMPLES / "cluster-4x8-h100.yaml", "--models", EXAMPLES / "deepseek-cascade.yaml",
         "--quality", EXAMPLES / "judged.csv")  # fmt: skip
THRESHOLDS = (84.0, SKIPPED)
CALM_PER_S = 16.0
FLOOR, MEAN = 72.0, 83.0


@pytest.fixture(scope="module")
def site() -> Site:
    return read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")


@pytest.fixture(scope="module")
def judged(site: Site) -> JudgedSample:
    return read_quality(EXAMPLES / "judged.csv", site.tiers)


@pytest.fixture(scope="module")
def demand(judged: JudgedSample) -> Demand:
    trace = read_trace(EXAMPLES / "trace.csv")
    return demand_of(trace, judged, requests=500, seed=1, lengths="quality", rate=CALM_PER_S)


@pytest.fixture(scope="module")
def strategies(site: Site) -> tuple[Strategy, ...]:
    """Small has headroom, as any tier below the one that gives way needs; medium is not used."""
    return strategies_of((((ReplicaShape(1, 1), 6),), (), ((ReplicaShape(8, 1), 1),)), site)


def planned(demand: Demand, strategies: tuple[Strategy, ...], **fields: Any) -> BurstLadder | NoLadder:
    options: dict[str, Any] = {"floor": FLOOR, "mean_quality": MEAN, "max_utilisation": 0.75} | fields
    return burst_ladder(demand, THRESHOLDS, strategies, Dispatch.CAPACITY, **options)


@pytest.fixture(scope="module")
def ladder(demand: Demand, strategies: tuple[Strategy, ...]) -> BurstLadder:
    result = planned(demand, strategies)
    assert isinstance(result, BurstLadder)
    return result


def coarse(sample: JudgedSample) -> JudgedSample:
    """Of a judge that knows four scores only."""
    return dataclasses.replace(sample, scores=np.round(sample.scores / 33.4) * 33.0)


def test_each_step_gives_way_further_and_says_what_it_has(
    demand: Demand, judged: JudgedSample, ladder: BurstLadder
) -> None:
    own, *further = ladder.steps
    assert [rule.score for rule in own.thresholds] == list(THRESHOLDS)
    assert own.quality == pytest.approx(route(judged, THRESHOLDS).quality)
    assert own.tier == "large"
    assert own.tier_share == route(demand.requests, THRESHOLDS).processed[-1].mean()
    assert len(further) >= 4
    for before, step in itertools.pairwise(ladder.steps):
        assert step.rate_per_s >= LEAST_GAIN * before.rate_per_s
        assert FLOOR <= step.quality <= before.quality
        assert step.thresholds[0].score <= before.thresholds[0].score
        assert step.thresholds[1].score == SKIPPED, "a tier without GPUs stays out"


@pytest.mark.parametrize("seed", range(5))
def test_expectations_over_ties_are_the_mean_of_what_routers_draw(seed: int) -> None:
    """Shares and quality of random rules, against the mean over many draws, each decided as a router does."""
    rng = np.random.default_rng(seed)
    scores = np.asarray(rng.integers(0, 4, (40, 3)) * 30.0, np.float64)
    predicted = np.asarray(rng.integers(0, 100, (40, 3)), np.float64)
    sample = JudgedSample(("a", "b", "c"), rng.integers(1, 50, 40), rng.integers(1, 90, (40, 3)), scores, predicted)
    sample = sample.under(AcceptanceRules(skip_below=(20.0, None))) if seed % 2 else sample
    rules = (BurstThreshold(float(rng.choice([30, 60])), 0.3), BurstThreshold(float(rng.choice([0, 60, 101])), 0.7))
    processed, quality = expected(sample, rules)
    scores_of = [rule.score for rule in rules]
    runs = [route(sample, scores_of, tie_rule(rules, draws(40, 3, draw))) for draw in range(1500)]
    assert np.mean([run.quality for run in runs]) == pytest.approx(quality, abs=0.3)
    assert np.mean([run.processed for run in runs], axis=0) == pytest.approx(processed, abs=0.06)
    drawn = draws(40, 3, 1)
    routed = route(sample, scores_of, tie_rule(rules, drawn))
    for i in range(40):
        answered = 2
        for tier, rule in enumerate(rules):
            if rule.score > 100 or (sample.passed_over is not None and sample.passed_over[i, tier]) or answered < 2:
                continue
            tied = scores[i, tier] == rule.score and tie_accepted(rule.tie_share, drawn[i, tier])
            if scores[i, tier] > rule.score or tied:
                answered = tier
        assert routed.answered[i] == answered


def test_a_step_is_the_best_of_all_rules_that_sustain_its_rate(
    demand: Demand, strategies: tuple[Strategy, ...]
) -> None:
    """With a coarse judge, whose rules are few: no other rule of at least the step's rate has more quality."""
    rough = Demand(coarse(demand.judged), coarse(demand.requests), demand.arrival_s)
    own = (66.0, SKIPPED)
    ladder = burst_ladder(
        rough, own, strategies, Dispatch.CAPACITY, floor=20.0, mean_quality=30.0, max_utilisation=0.75
    )
    assert isinstance(ladder, BurstLadder)
    rules = rules_below(rough.judged, 0, BurstThreshold(own[0]), 100)
    assert rules[0] == BurstThreshold(66.0)
    assert [rule.tie_share for rule in rules[1:5]] == [*TIE_SHARES, 1.0], "a part of the ties at 33"
    skipped = BurstThreshold(SKIPPED)
    reach = {rule: float(expected(rough.judged, (rule, skipped))[0][-1].mean()) for rule in rules}
    for step in ladder.steps[1:]:
        others = [r for r in rules if reach[r] <= reach[step.thresholds[0]]]
        assert step.quality == pytest.approx(max(expected(rough.judged, (r, skipped))[1] for r in others))
    assert any(step.thresholds[0].tie_share < 1 for step in ladder.steps)


def test_where_nothing_helps_the_reason_is_said(demand: Demand, strategies: tuple[Strategy, ...], site: Site) -> None:
    """The first tier breaks first, the floor is at the plan's own quality, or the arrivals have no rate."""
    narrow = strategies_of((((ReplicaShape(1, 1), 1),), (), ((ReplicaShape(8, 1), 3),)), site)
    first = planned(demand, narrow)
    assert isinstance(first, NoLadder)
    assert "small breaks first" in first.reason
    high = planned(demand, strategies, floor=88.09)
    assert isinstance(high, NoLadder)
    assert "88.09" in high.reason
    at_once = Demand(demand.judged, demand.requests, np.zeros(len(demand.arrival_s)))
    none = planned(at_once, strategies)
    assert isinstance(none, NoLadder)
    assert "no rate" in none.reason


def test_under_a_burst_the_slo_and_the_mean_hold_where_fixed_thresholds_break(
    site: Site, judged: JudgedSample, ladder: BurstLadder, strategies: tuple[Strategy, ...]
) -> None:
    """Three times the rate for 40 s of every 300 s: p95 stays under 25 s, and every 600 s have the mean score."""
    rng, at_s, arrivals = np.random.default_rng(1), 0.0, list[float]()
    while at_s < 1500:
        at_s += rng.exponential(1 / (3 * CALM_PER_S if at_s % 300 > 260 else CALM_PER_S))
        arrivals.append(at_s)
    arrival_s = np.array(arrivals)
    bursty = draw_demand(judged, arrival_s, 1)
    run = simulate_bursts(site, bursty, ladder, strategies, Dispatch.CAPACITY)
    fixed_s = run_cascade(site, bursty, THRESHOLDS, strategies, Dispatch.CAPACITY).total_s
    assert np.percentile(run.cascade.total_s, 95) < 25 < 35 < np.percentile(fixed_s, 95)
    sums = np.concatenate(([0.0], np.cumsum(run.scores)))
    begins = np.searchsorted(arrival_s, arrival_s - 600.0)
    counts = np.arange(1, len(arrival_s) + 1) - begins
    means = (sums[1:] - sums[begins]) / counts
    assert means[arrival_s >= 600].min() >= MEAN
    assert run.steps.max() >= 4
    assert 0 < run.changes < 60


def test_without_a_burst_the_plans_own_thresholds_hold(
    site: Site, demand: Demand, ladder: BurstLadder, strategies: tuple[Strategy, ...]
) -> None:
    steps, changes = steps_taken(ladder, np.arange(3000) / CALM_PER_S, 600.0)
    assert not steps.any()
    assert changes == 0
    run = simulate_bursts(
        site, demand, dataclasses.replace(ladder, steps=ladder.steps[:1] * 2), strategies, Dispatch.CAPACITY
    )
    without = run_cascade(site, demand, THRESHOLDS, strategies, Dispatch.CAPACITY)
    assert run.cascade.reports == without.reports
    assert (run.cascade.total_s == without.total_s).all()
    processed, _ = route_by_steps(demand.requests, ladder, np.zeros(len(without.total_s), np.int64))
    assert (processed == route(demand.requests, THRESHOLDS).processed).all()


def test_a_published_ladder_accepts_no_answers_of_a_tier_without_instances(ladder: BurstLadder) -> None:
    published = mesh_ladder(ladder, (6, 0, 1))
    assert [step.thresholds[1] for step in published.steps] == [BurstThreshold(100.0)] * len(ladder.steps)
    assert [step.thresholds[0] for step in published.steps] == [step.thresholds[0] for step in ladder.steps]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"burst_floor": 70.0}, "rules.burst_mean"),
        ({"burst_mean": 70.0, "min_quality": 80.0}, "rules.burst_mean"),
        ({"burst_floor": 70.0, "burst_mean": 81.0, "min_quality": 80.0}, "rules.burst_mean"),
        ({"burst_floor": 80.0, "min_quality": 80.0}, "rules.burst_floor"),
        ({"burst_floor": -1.0, "min_quality": 80.0}, "rules.burst_floor"),
        ({"burst_floor": float("nan"), "min_quality": 80.0}, "rules.burst_floor"),
        ({"burst_floor": 70.0, "burst_mean": float("nan"), "min_quality": 80.0}, "rules.burst_mean"),
    ],
)
def test_options_that_do_not_go_together_are_named(fields: dict[str, float], named: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        plain_options(max_latency_s=10.0, **fields).check(3)
    assert [problem.field for problem in error.value.problems] == [named]


def test_a_mean_over_the_plans_own_quality_is_refused() -> None:
    site, demand = site_and_demand(question())
    with pytest.raises(InvalidRequest, match="burst_mean"):
        plan_cascade(site, demand, plain_options(max_latency_s=1000.0, burst_floor=50.0, burst_mean=99.9))


@pytest.mark.slow
def test_commands_compute_show_replay_and_compare_a_ladder(tmp_path: Path, ladder: BurstLadder) -> None:
    """The plan file has it; `simulate` lets thresholds give way by it; a damaged one is named."""
    trace, one, other = EXAMPLES / "trace.csv", tmp_path / "one.json", tmp_path / "other.json"
    inputs_ = ("--trace", trace, "--min-quality", 80)
    with_floor = asked(runs=0, requests=60, rules={"burst_floor": 70, "burst_mean": 75})
    done = run("plan", *FILES, *inputs_, *with_floor, "--out", one)
    assert done.returncode == 0, done.output
    figures = json.loads(one.read_text())
    assert (figures["burst"] is None) == bool(figures["burst_reason"])
    assert ("Burst ladder" in done.output) == (figures["burst"] is not None)
    assert ("no burst ladder" in done.output) == (figures["burst"] is None)
    own = {"thresholds": figures["thresholds"], "tie_shares": [1.0, 1.0]}
    rules = [{**asdict(step), **own} for step in ladder.steps[:2]]
    lowest = [None if h is None else 0.0 for h in figures["thresholds"]]
    rules[0] |= {"rate_per_s": 1.0}
    rules[1] |= {"rate_per_s": 2.0, "thresholds": lowest, "quality": 75.0}
    figures["burst"] = {"mean_quality": 70.0, "steps": rules}
    other.write_text(json.dumps(figures))
    assert json.loads(json.dumps(plan_to_json(read_plan(other).plan)["burst"])) == figures["burst"]
    done = run("simulate", "--plan", other, "--trace", trace, "--requests", 200, "--json")
    assert done.returncode == 0, done.output
    burst = json.loads(done.stdout)["burst"]
    assert sum(burst["steps"]) == 200
    assert burst["steps"][1] > 100, "the trace comes faster than the first step sustains"
    shown = run("simulate", "--plan", other, "--trace", trace, "--requests", 200)
    assert "requests by step" in shown.output
    figures["burst"]["steps"][1]["rate_per_s"] = 0.5
    other.write_text(json.dumps(figures))
    with pytest.raises(FileError, match=r"burst\.steps\[1\]\.rate_per_s"):
        read_plan(other)
    for damaged in ({"mean_quality": 70.0}, {"mean_quality": 70.0, "steps": 5}, "x"):
        other.write_text(json.dumps(figures | {"burst": damaged}))
        with pytest.raises(FileError, match="not a plan file"):
            read_plan(other)
    assert run("plan", *FILES, *inputs_, *with_floor, "--sweep", "rate").returncode == 2
    assert "burst_mean" in run("plan", *FILES, *inputs_, *asked(rules={"burst_mean": 75})).output
