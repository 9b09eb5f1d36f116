"""The best answer of a request as its reply, where it is planned: routing, what users feel, plans, files, calls."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.mapper import from_message
from penstock.planner_service.codecs.plan_file import read_plan
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.live import solver
from penstock.planner_service.live.replanner import replan_job
from penstock.planner_service.live.rescheduling import Drift
from penstock.planner_service.planning.one_plan import PlanSearch
from penstock.planner_service.question.demand import draw_demand
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.replay.slo_classes import WorkloadClass
from penstock.planner_service.replay.slo_simulation import simulate_slos
from penstock.planner_service.replay.sustained_load import sustained_load
from penstock.planner_service.routing.quality import JudgedSample, all_qualities, route
from penstock.planner_service.routing.solution import Binds, Proof, Unreachable
from penstock.planner_service.rules.rule_ranking import RuleRanking
from penstock.planner_service.simulator import Dispatch
from penstock.question_files.errors import FileError
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.workload import RequestRecord, TierVisit, Window
from penstock.types.planned import PlanEvent
from penstock.types.planning import Objective
from penstock.types.plans import Plan, TierPlan
from penstock.types.rules import AcceptanceRules
from tests.conftest import ROOT
from tests.planner.test_grading import planned_strategies, site_of
from tests.support.cli import penstock
from tests.support.hard_prompts import demand_at
from tests.support.plain_plans import plain_options, plan_cascade
from tests.support.present import present
from tests.support.questions import asked, replan_question
from tests.support.sites import a100_site
from tests.support.two_tiers import two_tier_files

BEST = AcceptanceRules(best_answer=True)


def last_answers_are_often_worse(seed: int, count: int = 400) -> tuple[Site, Demand]:
    """Two tiers of which neither scores better, for requests that are all alike otherwise."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 101, (count, 2)).astype(np.float64)
    judged = JudgedSample(("small", "large"), rng.integers(20, 60, count), np.full((count, 2), 80), scores)
    site = a100_site("llama-3.1-8b", "llama-3.1-70b", judge_s=0.05)
    return site, draw_demand(judged, np.cumsum(rng.exponential(1 / 30, count)), seed)


def wanted_of(demand: Demand) -> float:
    """A quality that last answers hardly reach."""
    return float(all_qualities(demand.judged)[1].max()) - 0.1


@pytest.mark.parametrize("objective", list(Objective))
def test_a_plan_needs_fewer_escalations_for_the_same_quality(objective: Objective) -> None:
    """The plan is what was simulated; where the goal is latency, it is no slower than the plan without."""
    site, demand = last_answers_are_often_worse(1)
    wanted = wanted_of(demand)
    plain = plan_cascade(site, demand, min_quality=wanted, objective=objective)
    plan = plan_cascade(site, demand, min_quality=wanted, objective=objective, best_answer=True)
    assert not plain.rules.best_answer
    assert plan.rank(plan.goal) <= plain.rank(plan.goal)
    assert plan.quality >= wanted
    under = demand.under(plan.rules)
    run = run_cascade(site, under, plan.thresholds, [t.strategy for t in plan.tiers], Dispatch.CAPACITY)
    assert route(under.judged, plan.thresholds).quality == plan.quality
    if objective is not Objective.LARGEST_TIER:
        assert run.latency_s(objective, 95.0) == plan.felt_s
    if objective is Objective.END_TO_END:
        assert plan.rules.best_answer
        assert plan.tiers[1].share_processed < 0.9 * plain.tiers[1].share_processed
    most = plan_cascade(site, demand, max_latency_s=60, objective=objective, goal=None, best_answer=True)
    assert most.rules.best_answer
    assert (most.solution.proof, most.solution.gap) == (Proof.SEARCHED, None), "nothing is proved of the better kind"
    assert most.quality > demand.judged.best + 5  # the most without it is about the better tier's


def test_what_cannot_be_had_is_told_of_the_plan_that_comes_nearer() -> None:
    site, demand = last_answers_are_often_worse(2)
    most = demand.under(BEST).judged.most
    with pytest.raises(Unreachable, match="min quality") as unreachable:
        plan_cascade(site, demand, min_quality=most + 1, best_answer=True)
    assert unreachable.value.best == pytest.approx(most)
    with pytest.raises(Unreachable, match="max latency") as unreachable:  # the quality can be had, with best answers
        plan_cascade(site, demand, min_quality=most - 0.5, max_latency_s=0.01, best_answer=True)
    assert unreachable.value.binds is Binds.MAX_LATENCY


def test_scores_that_err_may_make_the_best_answer_worse() -> None:
    """What the judge scores highest is mostly bad: the last tier alone is better, and stays within reach."""
    rng = np.random.default_rng(1)
    quality = np.stack([rng.integers(0, 40, 200), rng.integers(60, 101, 200)], axis=1).astype(np.float64)
    site, demand = last_answers_are_often_worse(1, 200)
    judged = dataclasses.replace(demand.judged, scores=100.0 - quality, known_quality=quality)
    assert judged.under(BEST).quality_over((0, 1)).mean() < 40
    assert judged.under(BEST).most == judged.best
    offered = draw_demand(judged, demand.arrival_s, 1)
    plan = plan_cascade(site, offered, min_quality=judged.best - 0.5, best_answer=True)
    assert plan.quality >= judged.best - 0.5


def test_cascades_are_chosen_with_best_answers() -> None:
    """A quality that only two tiers together have; the error beyond tells the most that can be had."""
    site, demand = last_answers_are_often_worse(2)
    most = demand.under(BEST).judged.most
    plan = plan_cascade(site, demand, min_quality=most - 0.5, max_tiers=2, best_answer=True)
    assert plan.rules.best_answer
    assert len(plan.tiers) == 2
    with pytest.raises(Unreachable) as unreachable:
        plan_cascade(site, demand, min_quality=most + 5, max_tiers=2, best_answer=True)
    assert unreachable.value.best == pytest.approx(most)
    alone = plan_cascade(site, demand, min_quality=40, max_tiers=1, best_answer=True)
    assert not alone.rules.best_answer  # a single tier has one answer


def test_the_choice_of_rules_counts_the_wait_for_the_best_answer() -> None:
    """Where every request has an answer to compare with the last one, its first token comes when that one is judged."""
    site, demand = last_answers_are_often_worse(5)
    values = []
    for objective in (Objective.FIRST_TOKEN, Objective.END_TO_END):
        options = plain_options(min_quality=60.0, objective=objective)  # more than either tier alone
        deployer, _ = PlanSearch(site, options, lambda _: None).deployer(demand)
        ranking = RuleRanking(demand, deployer, options, site.judge_s, None)
        values.append([one.value for one in ranking.ranked([], [BEST])])
    assert values[0] == pytest.approx(values[1])


def test_a_held_answer_keeps_its_slo_only_if_it_is_whole_in_time() -> None:
    """Requests that escalate see a first token of the last tier at once; with best answers, all of them at its end."""
    site, demand, strategies = two_requests()
    first_s = run_cascade(site, demand, (60.0,), strategies, Dispatch.CAPACITY).felt_s(Objective.FIRST_TOKEN)[0]
    whole_s = run_cascade(site, demand.under(BEST), (60.0,), strategies, Dispatch.CAPACITY).total_s[0]
    between = [WorkloadClass("chat", float(first_s + whole_s) / 2, 1.0, 1.0)]
    later = [WorkloadClass("chat", 1.5 * float(whole_s), 1.0, 1.0)]
    attained = {
        (name, when): simulate_slos(site, one, (60.0,), strategies, classes, 1)[0].attainment
        for name, one in (("last", demand), ("best", demand.under(BEST)))
        for when, classes in (("between", between), ("later", later))
    }
    assert attained["last", "between"] == 1.0
    assert attained["best", "between"] == 0.5  # the other request does not escalate
    assert attained["best", "later"] == 1.0


def two_requests() -> tuple[Site, Demand, tuple[Strategy, Strategy]]:
    """Far apart, so that neither waits: the first escalates and is answered best by the first tier, the other is accepted."""
    site, _ = last_answers_are_often_worse(1)
    scores = np.array([[40.0, 30.0], [80.0, 90.0]])
    judged = JudgedSample(("small", "large"), np.full(2, 30), np.array([[50, 70], [50, 70]]), scores)
    demand = Demand(judged, judged, np.array([0.0, 1000.0]))
    replicas = [site.replica(tier, ReplicaShape(tp, 1), 4096)[0] for tier, tp in ((0, 1), (1, 2))]
    return site, demand, (Strategy(((present(replicas[0]), 1),), 0.0), Strategy(((present(replicas[1]), 1),), 0.0))


def test_who_escalates_waits_for_the_judge_twice_and_sees_the_reply_whole() -> None:
    site, demand, strategies = two_requests()
    plain = run_cascade(site, demand, (60.0,), strategies, Dispatch.CAPACITY)
    best = run_cascade(site, demand.under(BEST), (60.0,), strategies, Dispatch.CAPACITY)
    assert best.total_s - plain.total_s == pytest.approx([0.05, 0.0])
    assert plain.felt_s(Objective.FIRST_TOKEN)[0] < plain.total_s[0]
    assert best.felt_s(Objective.FIRST_TOKEN) == pytest.approx(best.total_s)
    small, large = best.written_s[0, 0] / 49, plain.written_s[1, 0] / 69
    assert best.felt_s(Objective.PACE)[0] == pytest.approx(small)  # the reply is the first tier's
    assert plain.felt_s(Objective.PACE)[0] == pytest.approx(large)


def test_answers_of_the_last_tier_are_grading_requests_too(tmp_path: Path) -> None:
    """Where the last tier grades, it is sent its own answers, if there is another to compare them with."""
    site = site_of(tmp_path, {"tier": "large"})
    demand = demand_at(1.0, 100)
    strategies, best = planned_strategies(site, demand), demand.under(BEST)
    thresholds = (60.0,) * (len(site.tiers) - 1)
    plain_run = run_cascade(site, demand, thresholds, strategies, Dispatch.CAPACITY)
    best_run = run_cascade(site, best, thresholds, strategies, Dispatch.CAPACITY)
    processed = route(demand.requests, thresholds).processed
    more = int((processed[-1] & processed[:-1].any(axis=0)).sum())
    assert more > 0
    assert present(best_run.grading).requests == present(plain_run.grading).requests + more
    loads = [
        sustained_load(one.requests, one.arrival_s, processed, strategies, Dispatch.CAPACITY, present(site.grading))
        for one in (demand, best)
    ]
    assert present(loads[1]).utilisation[-1] > present(loads[0]).utilisation[-1]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return two_tier_files(tmp_path_factory.mktemp("files"), last_answers_are_often_worse(1)[1], 80, judge_s=0.05)


def test_a_plan_file_has_it_and_is_replayed_and_rendered_with_it(files: dict[str, Path], tmp_path: Path) -> None:
    out, cluster = tmp_path / "plan.json", ROOT / "examples/cluster-1x8-h100.yaml"
    site = ("--cluster", cluster, "--models", files["models"], "--gpus", 4)
    work = ("--trace", files["trace"], "--quality", files["judged"])
    wanted = wanted_of(last_answers_are_often_worse(1)[1])
    rules = asked(requests=200, runs=0, rules={"best_answer": True})
    result = penstock("plan", *site, *work, "--min-quality", wanted + 0.5, *rules, "--no-plot", "--out", out)
    assert result.returncode == 0, result.output
    figures = json.loads(out.read_text())
    assert figures["best_answer"] is True
    assert "delivered: the answer with the highest score" in result.output
    assert "best of all" in result.output
    assert read_plan(out).plan.best_answer
    replay = ("simulate", "--plan", out, "--trace", files["trace"], "--requests", 200, "--json")
    replayed = json.loads(penstock(*replay).stdout)
    assert penstock("plan", "render", out, "--to", "compose").returncode == 0
    mesh = yaml.safe_load(out.with_suffix(".mesh.yaml").read_text())
    assert mesh["planner"] == {"best_answer": True}
    out.write_text(json.dumps(figures | {"best_answer": False}))
    plain = json.loads(penstock(*replay).stdout)
    escalated = replayed["tiers"][1]["requests"] / replayed["requests"]
    assert replayed["end_to_end_s"]["mean"] - plain["end_to_end_s"]["mean"] == pytest.approx(0.05 * escalated, rel=1e-3)
    assert penstock("plan", "render", out, "--to", "compose").returncode == 0
    assert "planner" not in yaml.safe_load(out.with_suffix(".mesh.yaml").read_text())
    out.write_text(json.dumps({name: value for name, value in figures.items() if name != "best_answer"}))
    assert not read_plan(out).plan.best_answer  # of an earlier version
    out.write_text(json.dumps(figures | {"best_answer": "yes"}))
    with pytest.raises(FileError, match="best_answer"):
        read_plan(out)


def test_planning_again_keeps_it(tmp_path: Path) -> None:
    """A plan for sampled requests is made for replies of the same kind as the current plan's."""
    records = tuple(
        RequestRecord(0.0, 400, (TierVisit("small", 200, 40.0), TierVisit("large", 200, large)))
        for large in (60.0, 20.0)
    )
    question = str(replan_question(tmp_path, min_quality=45))
    drift = Drift((), (Window(0.0, 25.0, (50,), records * 25),))
    tiers = TierPlan("small", "s", 50.0, 1), TierPlan("large", "l", None, 1)

    def planned(*, best_answer: bool) -> Any:
        of_plan = replan_job(question, drift, Plan(1, tiers, best_answer=best_answer))
        assert of_plan.rules.best_answer == best_answer
        responses = list[Any]()
        solver.replan(of_plan.to_json(), responses.append)
        return from_message(responses[0], PlanEvent)

    with pytest.raises(Unreachable) as unreachable:  # 40, whoever escalates
        planned(best_answer=False)
    assert unreachable.value.binds is Binds.MIN_QUALITY
    assert planned(best_answer=True).quality == pytest.approx(50, abs=3)
