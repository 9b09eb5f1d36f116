"""The search for rules besides thresholds: how much it simulates, and what it finds."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from penstock.planner_service.deployment.search import LatencyTable
from penstock.planner_service.planning.rule_search import LEAST_SIMULATIONS
from penstock.planner_service.question.demand import draw_demand
from penstock.planner_service.question.planning_options import Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.rules.rule_ranking import lowest_thresholds
from penstock.services.acceptance.pipeline import candidates
from penstock.types.planning import Goal, Objective
from tests.support.plain_plans import plain_options, plan_cascade
from tests.support.sites import a100_site

NEAR = 0.25  # points: searches that begin elsewhere end elsewhere


def question(seed: int, count: int = 300) -> tuple[Site, Demand]:
    """Three tiers, with all that rules need: lengths and predicted scores."""
    rng = np.random.default_rng(seed)
    length = rng.choice([40, 80, 700], count, p=[0.4, 0.4, 0.2])
    tokens = np.stack([length, length, length], axis=1)
    grades = np.stack([rng.integers(0, 11, count), rng.integers(4, 11, count), rng.integers(7, 11, count)], axis=1)
    scores = np.asarray(grades * 10.0, np.float64)
    predicted = np.clip(scores + rng.normal(0, 20, scores.shape), 0, 100)
    site = a100_site("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", gpus=8, judge_s=0.05)
    judged = JudgedSample(site.tiers, rng.integers(20, 60, count), tokens, scores, predicted)
    return site, draw_demand(judged, np.cumsum(rng.exponential(0.05, count)), seed)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts simulations: of a tier, and of a whole cascade."""
    counts, simulate = Counter[str](), LatencyTable.simulate

    def whole(*arguments: Any) -> Any:
        counts["whole"] += 1
        return run_cascade(*arguments)

    def of_tier(table: LatencyTable, *arguments: Any) -> float:
        before = table.simulations
        seconds = simulate(table, *arguments)
        counts["tiers"] += table.simulations - before
        return seconds

    monkeypatch.setattr("penstock.planner_service.planning.one_plan.run_cascade", whole)
    monkeypatch.setattr(LatencyTable, "simulate", of_tier)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        plain_options(min_quality=75, objective=Objective.END_TO_END),
        plain_options(min_quality=75),
        pytest.param(
            plain_options(min_quality=75, max_latency_s=9.0, objective=Objective.END_TO_END), marks=pytest.mark.slow
        ),
        pytest.param(plain_options(max_latency_s=6.0, goal=Goal.QUALITY), marks=pytest.mark.slow),
        pytest.param(plain_options(min_quality=75, max_latency_s=9.0, goal=Goal.RATE), marks=pytest.mark.slow),
    ],
    ids=["end-to-end", "largest-tier", "cost", "quality", "rate"],
)
def test_all_rules_together_simulate_at_most_four_times_as_much(simulated: Counter[str], options: Options) -> None:
    """However many choices of rules there are; and the plan is no worse by its goal, and has what it says."""
    site, demand = question(1)
    plain = plan_cascade(site, demand, options)
    alone = simulated.total()
    simulated.clear()
    plan = plan_cascade(site, demand, options, skip=True, long_answers=True, best_answer=True)
    assert simulated.total() <= max(4 * alone, 1.1 * LEAST_SIMULATIONS)
    if options.aim is Goal.COST and options.objective is not Objective.LARGEST_TIER:
        assert plan.simulations <= simulated["tiers"]  # forms without a plan are not counted
        assert plan.choice is not None
    else:
        assert plan.simulations == simulated["tiers"]
    assert plan.rank(options.aim) <= plain.rank(options.aim)
    assert route(demand.judged.under(plan.rules), plan.thresholds).quality == plan.quality
    if options.min_quality is not None:
        assert plan.quality >= options.min_quality


def small_question(seed: int, count: int = 80) -> tuple[Site, Demand]:
    """Two tiers on a few GPUs, for prompts of which some are hard."""
    rng = np.random.default_rng(seed)
    length, hard = rng.choice([40, 80, 400], count, p=[0.4, 0.4, 0.2]), rng.random(count)
    scores = np.stack([rng.normal(90 - 70 * hard, 12), rng.normal(88 - 20 * hard, 8)], axis=1).clip(0, 100).round()
    predicted = np.clip(scores + rng.normal(0, rng.choice([5, 15]), scores.shape), 0, 100)
    tokens = np.stack([length, length], axis=1)
    site = a100_site("llama-3.2-1b", "llama-3.1-70b", judge_s=0.3)
    judged = JudgedSample(site.tiers, rng.integers(20, 60, count), tokens, scores, predicted)
    return site, draw_demand(judged, np.cumsum(rng.exponential(0.4, count)), seed)


@pytest.mark.parametrize("seed", range(20))
def test_skip_rules_reach_the_quality_that_planning_with_each_of_them_reaches(seed: int) -> None:
    site, demand = small_question(seed)
    best = plan_cascade(site, demand, min_quality=demand.judged.best - 1, objective=Objective.END_TO_END)
    limit_s = (0.7 + 0.05 * (seed % 7)) * best.felt_s
    options = plain_options(max_latency_s=limit_s, goal=Goal.QUALITY, objective=Objective.END_TO_END, skip=True)
    plan = plan_cascade(site, demand, options)
    for rules in candidates(demand.judged, options.rules)[0]:
        try:
            other = plan_cascade(site, demand.under(rules), options, skip=False)
        except Unreachable:
            continue
        assert plan.quality >= other.quality - NEAR


@pytest.mark.parametrize("seed", range(5))
def test_thresholds_that_are_estimated_have_the_quality_and_are_the_lowest(seed: int) -> None:
    judged = question(seed, 60)[1].judged
    for quality in (judged.worst, 70.0, 90.0):
        for thresholds in lowest_thresholds(judged, quality):
            assert route(judged, thresholds).quality >= quality - 1e-9
            lower = [level for level in judged.levels(1) if level < thresholds[1]]
            if lower and thresholds[1] <= 100:
                assert route(judged, (thresholds[0], lower[-1])).quality < quality
    assert lowest_thresholds(judged, 100.5) == []
