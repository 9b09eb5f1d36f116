"""Plans for what users feel: the search over ways to share the GPUs out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.planning.deployers import deployer_for
from penstock.planner_service.question.demand import draw_demand
from penstock.planner_service.question.planning_options import Goal
from penstock.planner_service.question.site import Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import Dispatch
from penstock.types.planning import Objective
from tests.support.plain_plans import plan_cascade
from tests.support.sites import a100_site

TIERS = ("small", "medium", "large")


def site() -> Site:
    return a100_site("llama-2-7b", "llama-2-13b", "llama-2-70b", nodes=2, gpus=8, judge_s=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 17, 66])
def test_every_goal_tries_all_ways_to_share_out_the_gpus(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves of GPUs one after another end at plans that are slower; what the least latency reaches is no limit too low."""
    rng = np.random.default_rng(seed)
    shares = np.sort(rng.uniform(0.3, 0.95, 3))
    good = rng.random((200, 3)) < shares
    scores = np.where(good, 100.0, rng.integers(0, 3, good.shape) * 10.0)
    outputs = rng.integers(50, 900, good.shape)
    judged = JudgedSample(TIERS, rng.integers(20, 200, 200), outputs, scores)
    rate = float(rng.choice([5, 10, 20, 40]))
    demand = draw_demand(judged, np.cumsum(rng.exponential(1 / rate, 300)), 1)
    wanted = judged.worst + 0.9 * (judged.best - judged.worst)

    def planned(**options: Any) -> CascadePlan:
        return plan_cascade(site(), demand, min_quality=wanted, objective=Objective.END_TO_END, **options)

    least = planned()
    limit_s = 1.01 * least.felt_s
    cheapest, best = (planned(max_latency_s=limit_s, goal=goal) for goal in (Goal.COST, Goal.QUALITY))
    assert max(cheapest.felt_s, best.felt_s) <= limit_s
    assert cheapest.gpus <= least.gpus
    assert best.quality >= wanted
    monkeypatch.setattr(Deployer, "splits", lambda *_: iter(()))
    assert planned().felt_s > 1.05 * least.felt_s
    with pytest.raises(Unreachable, match="max latency binds"):
        planned(max_latency_s=limit_s, goal=Goal.COST)


@pytest.mark.parametrize("rate", [30.0, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (60.0, 120.0))])
def test_no_way_to_share_out_the_gpus_beats_an_end_to_end_plan_by_much(rate: float) -> None:
    """Sixteen GPUs, three tiers, every split of them simulated whole: moves of GPUs one after another would miss some."""
    rng = np.random.default_rng(5)
    good = rng.random((200, 3)) < (0.85, 0.92, 0.97)
    scores = np.where(good, 100.0, rng.integers(0, 3, good.shape) * 10.0)
    judged = JudgedSample(TIERS, rng.integers(20, 200, 200), rng.integers(50, 900, good.shape), scores)
    demand = draw_demand(judged, np.cumsum(rng.exponential(1 / rate, 800)), 1)
    plan = plan_cascade(site(), demand, min_quality=88.0, objective=Objective.END_TO_END)
    deployer = deployer_for(site(), demand, gpus=None, dispatch=Dispatch.CAPACITY)[0]

    def felt_s(strategies: Sequence[Strategy]) -> float:
        return float(
            np.percentile(run_cascade(site(), demand, plan.thresholds, strategies, Dispatch.CAPACITY).total_s, 95)
        )

    assert plan.felt_s == pytest.approx(felt_s([tier.strategy for tier in plan.tiers]))
    splits = [felt_s(split.strategies) for split in deployer.splits(plan.thresholds)]
    assert plan.felt_s <= 1.02 * min(splits)
