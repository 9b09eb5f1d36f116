"""The cascade chosen from candidates: against brute force, what is left out, what is refused, and with other options."""

import contextlib
import dataclasses
import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.brute_force import exhaustive_latency, kinds
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.files.hardware import gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.planning import cascade_choice
from penstock.planner_service.planning import plan_cascade as planning
from penstock.planner_service.planning.cascade_choice import cascades_of
from penstock.planner_service.planning.cascade_plan import CascadePlan, LeftOut
from penstock.planner_service.planning.plan_cascade import chosen_of
from penstock.planner_service.planning.verdict import verdict
from penstock.planner_service.question.demand import draw_demand
from penstock.planner_service.question.planning_options import Goal, Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.routing import grid
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.routing.solution import Binds, Proof, Unreachable
from penstock.planner_service.simulator import Dispatch, Workload
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ClusterSpec
from penstock.types.planning import Objective
from penstock.types.rules import AcceptanceRules
from tests.conftest import ROOT
from tests.support.cli import penstock
from tests.support.inputs import read_site
from tests.support.plain_plans import plain_options, plan_cascade
from tests.support.present import present
from tests.support.questions import asked

run = partial(penstock, columns=500)

EXAMPLES = ROOT / "examples"
NAMES = ("a", "b", "c", "d")
GPUS, REQUESTS = 3, 20
MEANS = (45.0, 55.0, 70.0, 85.0)


def pool(seed: int, means: tuple[float, ...] = MEANS) -> tuple[Site, Demand]:
    """Four candidates, each slower than the one before, and requests with scores in twenties; larger models are not always
    better."""
    rng = np.random.default_rng(seed)
    speeds = np.sort(rng.uniform(0.3, 3.0, len(means)))
    scores = np.clip(np.round(rng.normal(rng.normal(means, 8), 25, (REQUESTS, len(means))) / 20) * 20, 0, 100)
    lengths = rng.integers(5, 60, REQUESTS), rng.integers(2, 50, (REQUESTS, len(means)))
    sample = JudgedSample(NAMES[: len(means)], *lengths, scores)
    return site_of(speeds.tolist()), Demand(sample, sample, np.cumsum(rng.exponential(0.05, REQUESTS)))


def site_of(speeds: list[float]) -> Site:
    cluster, model = ClusterSpec(gpu_of_catalogue("h100"), 1, GPUS, 1e9), model_of_catalogue("qwen2.5-1.5b")
    names, measured = NAMES[: len(speeds)], tuple(tuple(kinds(speed)) for speed in speeds)
    return Site(cluster, names, (model,) * len(names), measured=measured)


def wanted(demand: Demand) -> float:
    """Seven tenths of the way from the worst candidate's mean score to the best one's."""
    means = demand.judged.scores.mean(axis=0)
    return float(means.min() + 0.7 * (means.max() - means.min()))


class BruteForce:
    """Every cascade of one to three candidates, every combination of thresholds, every split of GPUs and multiset of
    replicas."""

    def __init__(self, site: Site, demand: Demand) -> None:
        self.routings: list[tuple[float, list[list[float]]]] = []  # quality, latency by GPUs of each tier
        known: dict[tuple[int, bytes], list[float]] = {}
        for size in (1, 2, 3):
            for tiers in itertools.combinations(range(len(site.tiers)), size):
                sample = demand.judged.only(tiers)
                for thresholds in itertools.product(*(sample.levels(tier) for tier in range(size - 1))):
                    routed, rows = route(sample, thresholds), []
                    for tier, chosen in zip(tiers, routed.processed, strict=True):
                        key = (tier, chosen.tobytes())
                        if key not in known:
                            known[key] = latencies(site, demand, tier, chosen)
                        rows.append(known[key])
                    self.routings.append((routed.quality, rows))

    def latency(self, quality: float) -> float:
        return min((least_s(rows) for q, rows in self.routings if q >= quality - 1e-9), default=math.inf)

    def cost(self, quality: float, limit_s: float) -> float:
        costs = [
            sum(next((f for f, s in enumerate(row) if s <= limit_s), GPUS + 1) for row in rows)
            for q, rows in self.routings
            if q >= quality - 1e-9
        ]
        return min((cost for cost in costs if cost <= GPUS), default=math.inf)

    def quality(self, limit_s: float) -> float:
        return max((q for q, rows in self.routings if least_s(rows) <= limit_s), default=-math.inf)


def latencies(site: Site, demand: Demand, tier: int, chosen: Any) -> list[float]:
    """The p95 of a tier on 0, 1, ... GPUs."""
    sample = demand.requests
    work = Workload(demand.arrival_s[chosen], sample.input_tokens[chosen], sample.output_tokens[chosen, tier])
    if not len(work):
        return [0.0] * (GPUS + 1)
    found: list[Strategy | None] = [
        exhaustive_latency(work, list(site.measured[tier]), f, Dispatch.CAPACITY, 95.0) for f in range(GPUS + 1)
    ]
    return [math.inf if strategy is None else strategy.latency_s for strategy in found]


def least_s(rows: list[list[float]]) -> float:
    splits = itertools.product(range(GPUS + 1), repeat=len(rows))
    return min(max(row[f] for row, f in zip(rows, split, strict=True)) for split in splits if sum(split) <= GPUS)


def planned(site: Site, demand: Demand, **targets: Any) -> CascadePlan:
    return plan_cascade(site, demand, **({"max_tiers": 3} | targets))


def names_of(plan: CascadePlan) -> tuple[str, ...]:
    return tuple(tier.name for tier in plan.tiers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 16))])
def test_the_choice_is_brute_forces(seed: int) -> None:
    """For the goals latency, cost and quality: 112 questions to 16 pools, all in one enumeration for each pool."""
    site, demand = pool(seed)
    demand = demand.scaled(
        0.05 if seed % 2 else 1.0
    )  # every other one nearly without load, where lower bounds are close
    exact, quality = BruteForce(site, demand), wanted(demand)
    limit_s = float(np.random.default_rng(seed + 100).uniform(0.9, 2.5)) * exact.latency(0.0)
    if seed % 2:
        limit_s = 1.0001 * exact.latency(quality)
    fastest = planned(site, demand, min_quality=quality)
    assert fastest.latency_p95_s == pytest.approx(exact.latency(quality))
    assert fastest.quality >= quality - 1e-9
    assert fastest.solution.proof is not Proof.SEARCHED
    lean = exact.cost(quality, limit_s)
    if lean == math.inf:
        with pytest.raises(Unreachable, match="max latency binds") as refused:
            planned(site, demand, min_quality=quality, max_latency_s=limit_s)
        assert refused.value.best == pytest.approx(exact.latency(quality))
    else:
        cheapest = planned(site, demand, min_quality=quality, max_latency_s=limit_s)
        assert cheapest.gpus == lean
        assert cheapest.latency_p95_s <= limit_s
        felt = planned(site, demand, min_quality=quality, max_latency_s=4 * limit_s, objective=Objective.END_TO_END)
        assert felt.gpus * (1 - present(felt.solution.gap)) - 1e-9 <= lean
    for limit in (limit_s, *(factor * exact.latency(0.0) for factor in (1.1, 1.5, 2.0, 3.0))):
        best = exact.quality(limit)
        if best == -math.inf:
            with pytest.raises(Unreachable, match="max latency binds"):
                planned(site, demand, max_latency_s=limit)
        else:
            assert planned(site, demand, max_latency_s=limit).quality == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 4, 7, 13))])
def test_the_highest_rate_is_brute_forces(seed: int) -> None:
    """Some cascade serves it within the targets; none serves a little more. Cascades that are left out lose nothing."""
    site, demand = pool(seed)
    quality = wanted(demand)
    idle, burst = (BruteForce(site, demand.scaled(factor)).latency(quality) for factor in (0.02, 100.0))
    limit_s = (idle + burst) / 2
    plan = planned(site, demand, min_quality=quality, max_latency_s=limit_s, goal=Goal.RATE)
    factor = present(plan.rate_per_s) / present(demand.rate_per_s)
    assert BruteForce(site, demand.scaled(factor * (1 - 1e-9))).latency(quality) <= limit_s * (1 + 1e-6)
    assert BruteForce(site, demand.scaled(factor * 1.05)).latency(quality) > limit_s
    assert plan.solution.proof is Proof.SEARCHED


@pytest.mark.slow
@pytest.mark.parametrize("objective", [Objective.END_TO_END, Objective.LARGEST_TIER])
def test_a_stated_cascade_of_four_tiers_is_no_worse_than_the_best_three_of_them(objective: Objective) -> None:
    """What users feel is planned for more than three tiers, too: those that are not chosen are not used."""
    site, demand = pool(3)
    demand = demand.scaled(0.1)
    plan = plan_cascade(site, demand, Options(min_quality=wanted(demand), objective=objective))
    assert [tier.name for tier in plan.tiers] == list(site.tiers)
    limit_s = None if plan.largest_alone is None else plan.largest_alone.limit_s
    part = Options(min_quality=wanted(demand), max_latency_s=limit_s, objective=objective)
    assert plan.felt_s <= (limit_s or math.inf)
    ranks = []
    for tiers in itertools.combinations(range(4), 3):
        with contextlib.suppress(Unreachable):
            ranks.append(plan_cascade(site.only(tiers), demand.only(tiers), part).rank(plan.goal)[0])
    assert plan.rank(plan.goal)[0] <= min(ranks) + 1e-9


@pytest.mark.parametrize("goal", [pytest.param(g, marks=pytest.mark.slow if g is Goal.RATE else []) for g in Goal])
@pytest.mark.parametrize("seed", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_what_users_feel_is_the_best_of_all_cascades_planned_one_by_one(goal: Goal, seed: int) -> None:
    """End to end there is no brute force: the choice is the best of the plans for each cascade; the runner-up has
    other tiers."""
    site, demand = pool(seed)
    demand = demand.scaled(0.1)  # that a plan sustains
    options = plain_options(
        min_quality=wanted(demand),
        max_latency_s=None if goal is Goal.LATENCY else 2.5,
        goal=goal,
        objective=Objective.END_TO_END,
        max_utilisation=0.75,
    )
    ranks: dict[tuple[str, ...], tuple[float, float]] = {}
    for tiers in cascades_of(4, plain_options(max_tiers=2)):
        with contextlib.suppress(Unreachable):
            plan = plan_cascade(site.only(tiers), demand.only(tiers), options)
            serving = tuple(tier.name for tier in plan.tiers if tier.strategy.used)
            ranks[serving] = min(ranks.get(serving, (math.inf, 0.0)), plan.rank(goal))
    best, second, *_ = sorted(ranks.values())
    chosen = plan_cascade(site, demand, dataclasses.replace(options, max_tiers=2))
    assert chosen.rank(goal) == best
    choice = present(chosen.choice)
    other = present(choice.runner_up)
    figures = {
        Goal.LATENCY: other.latency_p95_s,
        Goal.COST: other.cost.gpus,
        Goal.QUALITY: -other.quality,
        Goal.RATE: -(other.rate_per_s or 0.0),
    }
    assert figures[goal] == second[0]
    assert choice.planned + sum(choice.left_out.values()) == choice.cascades == 10


@pytest.mark.parametrize("goal", [Goal.LATENCY, Goal.COST, Goal.QUALITY])
def test_a_search_that_has_no_time_plans_one_form_and_its_gap_holds(goal: Goal) -> None:
    for seed in (3, 5):
        site, demand = pool(seed)
        limit_s = None if goal is Goal.LATENCY else 2.5
        options = plain_options(min_quality=wanted(demand), max_latency_s=limit_s, goal=goal, max_tiers=2)
        whole, ended = (
            planning.plan_cascade(site, demand, options, is_over=over) for over in (lambda: False, lambda: True)
        )
        choice, gap = present(ended.choice), ended.solution.gap
        assert choice.planned == 1
        assert choice.left_out[LeftOut.SEARCH_TIME] > 0
        assert LeftOut.SEARCH_TIME not in present(whole.choice).left_out
        assert ended.quality >= wanted(demand) - 1e-9
        best, value = whole.rank(goal)[0], ended.rank(goal)[0]
        assert best <= value
        if gap is not None:
            assert best >= (value - gap if goal is Goal.QUALITY else value * (1 - gap)) - 1e-9


def graded(columns: list[list[float]], rate_per_s: float = 10.0, speeds: tuple[float, ...] = (0.3, 1.0, 3.0)) -> Any:
    """A site and 40 requests with these scores, by candidate."""
    scores = np.array(columns).T
    rng, count = np.random.default_rng(1), len(scores)
    lengths = rng.integers(5, 60, count), rng.integers(20, 40, (count, len(speeds)))
    sample = JudgedSample(NAMES[: len(speeds)], *lengths, scores)
    return site_of(list(speeds)), Demand(sample, sample, np.cumsum(rng.exponential(1 / rate_per_s, count)))


EASY = [90.0] * 28 + [10.0] * 12  # what the small model answers well, and what not


def test_a_useless_middle_model_is_not_chosen() -> None:
    """It costs three times as much as the small model and answers the same prompts well: no plan needs it."""
    site, demand = graded([EASY, EASY, [90.0] * 40], rate_per_s=20.0)
    for objective in (Objective.LARGEST_TIER, Objective.END_TO_END):
        plan = planned(site, demand, min_quality=85, max_latency_s=4.0, objective=objective)
        assert names_of(plan) == ("a", "c")
        choice = present(plan.choice)
        assert choice.cascades == 7
        assert "a + c of 3 candidates" in verdict(chosen_of(plan, site, demand)[0], plan)
        assert present(choice.runner_up).tiers == (("b", "c") if objective is Objective.LARGEST_TIER else ("c",))


def test_one_model_alone_may_be_best() -> None:
    """The middle one is as good as the large one: a cascade only adds latency. Of two tiers it serves alone, too."""
    site, demand = graded([EASY, [95.0] * 40, [95.0] * 40], speeds=(0.9, 1.0, 3.0))
    plan = planned(site, demand, min_quality=95)
    assert names_of(plan) == ("b",)
    assert plan.thresholds == ()
    choice = present(plan.choice)
    assert (choice.min_tiers, choice.max_tiers) == (1, 3)
    pair = planned(site, demand, min_quality=95, max_tiers=2, min_tiers=2)
    assert len(pair.tiers) == 2
    assert [tier.name for tier in pair.tiers if tier.strategy.used] == ["b"]
    assert present(pair.choice).cascades == 3


@pytest.mark.parametrize("objective", Objective)
def test_what_is_just_fast_enough_without_load_is_not_left_out(objective: Objective) -> None:
    """The better of two models alone, at a limit just above what it takes when idle; just below, it is too slow."""
    site, demand = graded([EASY, [95.0] * 40], rate_per_s=0.001, speeds=(1.0, 1.2))
    idle = plan_cascade(site.only([1]), demand.only([1]), min_quality=0.0, objective=objective).felt_s
    for factor, name, left_out in ((1.001, "b", {}), (0.999, "a", {LeftOut.MAX_LATENCY: 1})):
        plan = planned(site, demand, max_tiers=1, max_latency_s=factor * idle, objective=objective)
        assert names_of(plan) == (name,)
        assert present(plan.choice).left_out == left_out


@pytest.mark.slow
def test_the_proof_is_over_all_cascades() -> None:
    """Where all routings of all cascades are tried or ruled out it is a proof; what a search leaves open stays open."""
    site, demand = pool(2)
    plan = planned(site, demand, min_quality=wanted(demand))
    assert plan.solution.proof in (Proof.ENUMERATED, Proof.BOUNDED)
    assert plan.solution.gap == 0
    felt = planned(site, demand, min_quality=wanted(demand), objective=Objective.END_TO_END)
    alone = plan_cascade(*chosen_of(felt, site, demand), min_quality=wanted(demand), objective=Objective.END_TO_END)
    assert felt.solution.proof is Proof.SEARCHED
    assert present(felt.solution.gap) >= present(alone.solution.gap), (
        "another cascade may be better than its plan that was found"
    )
    lean = planned(site, demand, min_quality=wanted(demand), max_latency_s=2.0, objective=Objective.END_TO_END)
    assert 0 <= present(lean.solution.gap) < 1, "what sustains the rate bounds a cost"
    site, demand = graded([EASY, EASY, EASY], rate_per_s=20.0)  # too busy for c alone
    for runs in ([], [demand]):
        plan = planned(site, demand, min_quality=0, max_latency_s=3.0, max_utilisation=0.75, runs=runs)
        assert present(plan.choice).left_out[LeftOut.BOUND] == 1
        assert present(plan.solution.gap) == 0


@pytest.mark.slow
def test_what_the_searches_of_cascades_leave_open_is_in_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cascades are searched, not enumerated, by few tries: the plan is never further from the best than the gap says."""
    for module in (grid, cascade_choice):
        monkeypatch.setattr(module, "ENUMERATE_UP_TO", 0)
    monkeypatch.setattr(grid, "MOST_EVALUATIONS", 3)
    proofs = []
    for seed in range(16):
        site, demand = pool(seed)
        plan = planned(site, demand, min_quality=wanted(demand))
        exact, gap = BruteForce(site, demand).latency(wanted(demand)), present(plan.solution.gap)
        assert plan.latency_p95_s * (1 - gap) - 1e-9 <= exact <= plan.latency_p95_s + 1e-9
        assert (gap == 0) is (plan.solution.proof is Proof.BOUNDED)
        alone = plan_cascade(*chosen_of(plan, site, demand), min_quality=wanted(demand)).solution
        proofs.append((present(alone.gap) == 0, gap == 0))
    assert any(alone and not whole for alone, whole in proofs), "a proof for one cascade is none over all"
    assert any(whole for _, whole in proofs)


@pytest.mark.slow
def test_targets_that_no_cascade_meets_say_which_binds_and_the_nearest() -> None:
    site, demand = pool(5)
    quality = wanted(demand)
    exact_s = BruteForce(site, demand).latency(quality)
    with pytest.raises(Unreachable, match="no cascade of the candidates reaches quality 100") as refused:
        planned(site, demand, min_quality=100)
    assert refused.value.binds is Binds.MIN_QUALITY
    nearest = planned(site, demand, min_quality=refused.value.best - 1e-6)
    assert nearest.quality == pytest.approx(refused.value.best)
    for limit_s in (1e-3, 0.9 * exact_s):  # without load too slow, and only with it
        with pytest.raises(Unreachable, match=r"max latency binds.*the nearest of 14 cascades is") as slow:
            planned(site, demand, min_quality=quality, max_latency_s=limit_s)
        assert slow.value.binds is Binds.MAX_LATENCY
        assert slow.value.best == pytest.approx(exact_s)
        assert planned(site, demand, min_quality=quality, max_latency_s=slow.value.best * 1.001).latency_p95_s > limit_s
    fast = demand.scaled(1000.0)
    with pytest.raises(Unreachable, match="the rate binds") as busy:
        planned(site, fast, min_quality=quality, max_latency_s=60.0, max_utilisation=0.5)
    assert busy.value.binds is Binds.RATE
    able = fast.scaled(0.9 * busy.value.best / present(fast.rate_per_s))
    planned(site, able, min_quality=quality, max_latency_s=60.0, max_utilisation=0.5)


@pytest.mark.parametrize(
    ("options", "field", "problem"),
    [
        ({"max_tiers": 0}, "max_tiers", "must be at least 1, not 0"),
        ({"max_tiers": 5}, "max_tiers", "from 1 to the number of candidates, 4, not 5"),
        ({"max_tiers": 2, "min_tiers": 0}, "min_tiers", "must be at least 1, not 0"),
        ({"max_tiers": 2, "min_tiers": 3}, "min_tiers", "from 1 to max_tiers, 2, not 3"),
        ({"max_tiers": None, "min_tiers": 1}, "min_tiers", "goes with max_tiers"),
        ({"max_tiers": 4}, "max_tiers", "must be at most 3, the most tiers in a plan, not 4"),
        ({"max_tiers": None, "long_answers": True}, "rules", "go with up to 3 tiers"),
        ({"max_tiers": None, "best_answer": True, "goal": Goal.RATE, "max_latency_s": 9.0}, "rules", "up to 3 tiers"),
    ],
)
def test_unsound_numbers_of_tiers_are_refused(options: dict[str, Any], field: str, problem: str) -> None:
    site, demand = pool(0)
    with pytest.raises(InvalidRequest, match=problem) as refused:
        planned(site, demand, min_quality=50, **options)
    assert refused.value.problems[0].field == field


def test_more_than_three_tiers_are_not_planned_again_under_rules() -> None:
    site, demand = pool(0)
    with pytest.raises(InvalidRequest, match="go with up to 3 tiers") as refused:
        plan_cascade(site, demand.under(AcceptanceRules(best_answer=True)), min_quality=50)
    assert refused.value.problems[0].field == "rules"


def test_too_many_cascades_are_refused_at_once() -> None:
    """The number of cascades is checked before any of them is looked at, however large a request makes it."""
    for tiers in (40, 100_000):
        with pytest.raises(InvalidRequest, match="more than 1000 cascades"):
            plain_options(min_quality=50, max_tiers=3).check(tiers)
    plain_options(min_quality=50, max_tiers=1).check(1000)


def small_files(folder: Path, tiers: list[dict[str, Any]], **more: Any) -> Site:
    cluster = {"gpu": "h100", "nodes": 1, "gpus_per_node": 4, "dollars_per_gpu_hour": 3.0}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster | more.pop("cluster", {})))
    (folder / "models.yaml").write_text(yaml.safe_dump({"tiers": tiers, **more}))
    return read_site(folder / "cluster.yaml", folder / "models.yaml")


QWEN: list[dict[str, Any]] = [
    {"name": "a", "model": "qwen2.5-1.5b"},
    {"name": "b", "model": "qwen2.5-7b"},
    {"name": "c", "model": "qwen2.5-14b"},
    {"name": "d", "model": "qwen2.5-32b"},
]


def demand_at(rate_per_s: float, tiers: int = 4, count: int = 120) -> Demand:
    """Prompts of different difficulty, which larger models bear better; with predicted scores."""
    rng = np.random.default_rng(3)
    hard = rng.beta(1.2, 1.8, 80) * 2
    best, loss = np.linspace(85, 95, tiers), np.linspace(35, 8, tiers)
    scores = np.clip((best - loss * hard[:, None]) + rng.normal(0, 4, (80, tiers)), 0, 100).round(-1)
    predicted = np.clip(scores + rng.normal(0, 10, scores.shape), 0, 100)
    lengths = rng.integers(50, 400, 80), rng.integers(50, 200, (80, tiers))
    judged = JudgedSample(NAMES[:tiers], *lengths, scores, predicted)
    return draw_demand(judged, np.cumsum(rng.exponential(1 / rate_per_s, count)), 1)


def test_cascades_without_the_tier_that_grades_are_left_out(tmp_path: Path) -> None:
    """A grading tier is a tier of the mesh: each cascade of several has it. A single tier is not judged."""
    site, demand = small_files(tmp_path, QWEN, judge={"tier": "c", "question_tokens": 10}), demand_at(2.0)
    plan = planned(site, demand, min_quality=82, max_tiers=2)
    assert present(plan.choice).left_out[LeftOut.JUDGE] == 3, "a + b, a + d and b + d"
    graded_by_c = planned(site, demand, min_quality=82, max_tiers=2, min_tiers=2)
    assert "c" in names_of(graded_by_c)
    chosen, _ = chosen_of(graded_by_c, site, demand)
    assert chosen.tiers[present(chosen.grading).tier] == "c"
    assert site.only([3]).grading is None
    with pytest.raises(InvalidRequest, match="'c' is none of the tiers: a, b"):
        site.only([0, 1])
    by_model = present(small_files(tmp_path, QWEN, judge={"model": "judge", "token_s": 1e-5}).only([1, 3]).grading)
    assert (by_model.tier, by_model.by_tier) == (2, False)


@pytest.mark.parametrize("min_quality", [68, 72, 76, 80])
def test_no_prompt_reaches_a_tier_that_has_no_gpus(tmp_path: Path, min_quality: float) -> None:
    """Also where none of the few requests of the stretch does that is planned for, but some of another."""
    site, demand = small_files(tmp_path, QWEN[:3]), demand_at(2.0, 3, count=20)
    runs = [draw_demand(demand.judged, demand.arrival_s, seed) for seed in range(2, 6)]
    targets: dict[str, Any] = {"objective": Objective.END_TO_END, "max_latency_s": 60.0, "goal": Goal.COST}
    plan = planned(site, demand, runs=runs, min_quality=min_quality, **targets)
    processed = route(chosen_of(plan, site, demand)[1].judged.under(plan.rules), plan.thresholds).processed
    assert all(tier.strategy.used or not any(row) for tier, row in zip(plan.tiers, processed, strict=True))
    assert plan.quality >= min_quality


def test_drafters_stay_whichever_tiers_are_chosen(tmp_path: Path) -> None:
    """A drafter is a model next to its tier's, not a tier: also where it is the model of a candidate that is not chosen."""
    drafted = QWEN[3] | {"speculation": {"drafters": [{"model": "qwen2.5-1.5b", "acceptance": 0.8}]}}
    site = small_files(tmp_path, [*QWEN[:3], drafted]).only([1, 3])
    assert site.tiers == ("b", "d")
    assert [drafter.name for drafter, _ in site.speculation_of(1).drafters] == ["qwen2.5-1.5b"]
    assert site.speculation_of(0).drafters == ()
    assert small_files(tmp_path, [*QWEN[:3], drafted]).only([0, 1]).speculation == ()
    plan = planned(small_files(tmp_path, [*QWEN[:3], drafted]), demand_at(2.0), min_quality=85)
    assert "d" in names_of(plan)


def test_a_model_that_fits_nowhere_is_left_out_and_named(tmp_path: Path) -> None:
    tiers = [*QWEN[:2], {"name": "c", "model": "deepseek-r1-671b-awq"}]
    plan = planned(small_files(tmp_path, tiers), demand_at(2.0, 3), min_quality=70)
    assert present(plan.choice).left_out[LeftOut.GPUS] == 7, "four cascades, and three forms with prompts routed"
    assert "c" in plan.infeasible
    with pytest.raises(Unreachable, match="no cascade of the candidates fits the GPUs"):
        planned(small_files(tmp_path, tiers), demand_at(2.0, 3), min_quality=75, min_tiers=3)


@pytest.mark.slow
def test_prices_decide_between_gpus_and_an_api(tmp_path: Path) -> None:
    """Cheap tokens replace the GPUs of the large model, dear ones do not; cascades without the API compare in dollars too."""
    for dollars, api in ((0.1, True), (400.0, False)):
        remote = {
            "dollars_per_million_input_tokens": dollars,
            "dollars_per_million_output_tokens": dollars,
            "first_token_s": 0.3,
            "token_s": 0.005,
        }
        tiers = [QWEN[0], QWEN[3] | {"name": "b"}, {"name": "c", "model": "some-api-model", "remote": remote}]
        site = small_files(tmp_path, tiers)
        plan = planned(site, demand_at(4.0, 3), min_quality=70, max_latency_s=20.0, max_utilisation=0.75)
        assert ("c" in names_of(plan)) is api
        runner_up = present(present(plan.choice).runner_up)
        assert present(plan.dollars_per_hour) <= present(runner_up.cost.dollars_per_hour)
        assert (chosen_of(plan, site, demand_at(4.0, 3))[0].remotes != ()) is api


def test_several_types_of_gpu_are_chosen_with_the_cascade(tmp_path: Path) -> None:
    types = [
        {"gpu": "h100", "nodes": 1, "gpus_per_node": 2, "dollars_per_gpu_hour": 4.0},
        {"gpu": "l40s", "nodes": 1, "gpus_per_node": 2, "dollars_per_gpu_hour": 1.2},
    ]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"types": types}))
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"tiers": QWEN[:3]}))
    site = read_site(tmp_path / "cluster.yaml", tmp_path / "models.yaml")
    demand, targets = demand_at(2.0, 3), plain_options(min_quality=80, max_latency_s=20.0)
    plan = plan_cascade(site, demand, targets, max_tiers=2)
    alone = []
    for tiers in cascades_of(3, plain_options(max_tiers=2)):
        with contextlib.suppress(Unreachable):
            alone.append(plan_cascade(site.only(tiers), demand.only(tiers), targets).cost)
    assert plan.cost == pytest.approx(min(alone))


@pytest.mark.slow
def test_skip_rule_and_guarantee_go_with_the_choice(tmp_path: Path) -> None:
    """Each holds for the chosen cascade: its limits, its guarantee at the confidence that was asked for."""
    site, demand = small_files(tmp_path, QWEN[:3]), demand_at(6.0, 3)
    skipping = planned(site, demand, min_quality=80, max_tiers=2, min_tiers=2, skip=True)
    assert skipping.cost <= planned(site, demand, min_quality=80, max_tiers=2, min_tiers=2).cost
    assert skipping.solution.gap is None
    promise = present(planned(site, demand, min_quality=70, max_tiers=2, confidence=0.9).promise)
    assert promise.confidence == 0.9
    assert promise.least_quality >= 70
    most = demand.judged.best
    planned(site, demand, min_quality=most, max_tiers=2)
    with pytest.raises(Unreachable, match="on new prompts, with a confidence of 90%"):
        planned(site, demand, min_quality=most, max_tiers=2, confidence=0.9)


CANDIDATES = ("--cluster", EXAMPLES / "cluster-1x8-h100.yaml", "--models", EXAMPLES / "qwen2.5-candidates.yaml",
              "--quality", EXAMPLES / "judged-candidates.csv", "--trace", EXAMPLES / "trace.csv")  # fmt: skip


@pytest.mark.slow
def test_the_example_chooses_and_its_plan_is_an_ordinary_plan(tmp_path: Path) -> None:
    """The tiers of the plan file are the chosen ones; it is simulated, rendered and compared as any other."""
    out = tmp_path / "plan.json"
    targets = ("--min-quality", 80, "--max-latency", 20, "--rate", 20)
    chosen = asked(requests=100, runs=1, max_tiers=2)
    done = run("plan", *CANDIDATES, *targets, *chosen, "--slo", "chat=20s,1s", "--out", out)
    assert done.returncode == 0, done.output
    assert "runner-up: " in done.output
    assert "15 cascades of 1 to 2 tiers" in " ".join(done.output.split())
    plan = json.loads(out.read_text())
    names, choice = [tier["name"] for tier in plan["tiers"]], plan["candidates"]
    assert 1 <= len(names) <= 2
    assert set(names) <= set(choice["tiers"])
    assert (len(choice["tiers"]), choice["cascades"]) == (5, 15)
    assert choice["planned"] + sum(choice["left_out"].values()) == 15
    assert choice["runner_up"]["cost"]["gpus"] >= plan["cost"]["gpus"]
    assert choice["runner_up"]["tiers"] != names
    assert [one["name"] for one in plan["slo"]] == ["chat"]
    assert plan["optimality"]["over"].startswith("all 15 cascades of the candidates, ")
    assert (plan["inputs"]["max_tiers"], plan["inputs"]["min_tiers"]) == (2, None)
    assert f"{' + '.join(names)} of 5 candidates; " in plan["verdict"]
    done = run("simulate", "--plan", out, "--trace", EXAMPLES / "trace.csv", "--requests", 60, "--json")
    assert done.returncode == 0, done.output
    assert [tier["name"] for tier in json.loads(done.stdout)["tiers"]] == names
    done = run("plan", "render", out, "--to", "compose")
    assert done.returncode == 0, done.output
    mesh = next(path for path in tmp_path.iterdir() if "mesh" in path.name)
    assert [tier["name"] for tier in yaml.safe_load(mesh.read_text())["tiers"]] == names
    plan["tiers"][0]["name"] = "gone"
    out.write_text(json.dumps(plan))
    done = run("simulate", "--plan", out, "--trace", EXAMPLES / "trace.csv")
    assert done.returncode == 2
    assert "tiers: the plan has gone" in done.output


@pytest.mark.slow
def test_a_sweep_names_the_tiers_of_each_plan() -> None:
    how = asked(requests=60, runs=0, max_tiers=2, objective="largest-tier")
    done = run("plan", *CANDIDATES, *how, "--min-quality", 80, "--sweep", "quality=60,85")
    assert done.returncode == 0, done.output
    rows = [line for line in done.output.splitlines() if "qwen" in line]
    assert len(rows) == 2
