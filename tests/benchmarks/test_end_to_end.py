"""The pure parts of the end-to-end benchmark: how its systems are tuned, what is predicted, and what a run's figures are."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from benchmarks.end_to_end import figures, systems
from benchmarks.end_to_end.site import Layout
from benchmarks.end_to_end.systems import System
from benchmarks.spread import interval
from penstock.cli.held_out import Question
from penstock.cli.replay import Outcome, Run
from penstock.client.types import Reply
from penstock.planner_service.question.demand import draw_demand
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.routing.quality import SKIPPED, JudgedSample
from penstock.planner_service.simulator import EngineLimits, Replica
from penstock.services.domain.hardware import ClusterSpec, GpuSpec, ModelSpec, ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.events import TierSummary
from penstock.types.replies import FinishReason, Usage

TIERS = ("small", "medium", "large")
WORKERS = 4
LAYOUT = Layout("shared", WORKERS, False)
SLO_S = 1.0


def site(judge_s: float = 0.0) -> Site:
    """Tiers whose steps take 1, 3 and 10 ms."""
    replicas = tuple(
        (
            Replica(
                ReplicaShape(1, 1),
                StepLatencyModel.linear(ms / 1000, ms * 1e-5, 0.0),
                LAYOUT.kv_tokens,
                EngineLimits(LAYOUT.max_running),
            ),
        )
        for ms in (1, 3, 10)
    )
    model = ModelSpec("model", 2, 64, 4, 2, 16, 1e6, 1e6, 2.0, 256.0)
    cluster = ClusterSpec(GpuSpec("worker", 64e9, 1e10, 1e11, 1e10, 0.6, 0.8), 1, WORKERS, 1e10)
    return Site(cluster, TIERS, (model,) * 3, judge_s=judge_s, measured=replicas)


def judged(count: int = 200) -> JudgedSample:
    """Larger tiers answer more of the prompts well: half, four of five, all."""
    draw = np.random.default_rng(3)
    ease = draw.random(count)
    scores = np.stack([np.where(ease < share, 95.0, 5.0) for share in (0.5, 0.8, 1.0)], axis=1)
    return JudgedSample(TIERS, np.full(count, 30), np.full((count, 3), 40), scores)


def demand(rate: float = 20.0, count: int = 200) -> Demand:
    return draw_demand(judged(), np.arange(count) / rate, seed=1)


def test_the_best_mixture_at_a_cost_beats_every_other() -> None:
    """Against a fine grid over three tiers."""
    costs, qualities = (1.0, 3.0, 10.0), (50.0, 80.0, 95.0)
    grid = [(a / 50, b / 50, 1 - (a + b) / 50) for a in range(51) for b in range(51 - a)]
    for cost in (1.0, 2.0, 3.0, 5.5, 10.0, 20.0):
        shares = systems.mixture(costs, qualities, cost)
        assert sum(shares) == pytest.approx(1)
        assert sum(s * c for s, c in zip(shares, costs, strict=True)) <= cost + 1e-6
        quality = sum(s * q for s, q in zip(shares, qualities, strict=True))
        best = max(
            sum(s * q for s, q in zip(point, qualities, strict=True))
            for point in grid
            if sum(s * c for s, c in zip(point, costs, strict=True)) <= cost + 1e-9
        )
        assert quality >= best - 1e-6
    assert systems.mixture(costs, qualities, 0.5) == (1.0, 0.0, 0.0)  # nothing costs so little: the cheapest


def test_the_random_router_costs_no_more_than_our_plan() -> None:
    """Engine time includes judging, which a random router does without."""
    where, wanted = site(judge_s=0.001), demand()
    ours = System("plan", (2, 1, 1), (50.0, 50.0))
    cost_s = systems.engine_s(where, wanted.judged, ours)
    assert cost_s > systems.engine_s(site(), wanted.judged, ours)
    other = systems.random_router(where, wanted, cost_s, WORKERS, 1)
    assert systems.engine_s(where, wanted.judged, other) == pytest.approx(cost_s)  # between two tiers: all of it
    assert other.shares is not None
    assert sorted(share > 0 for share in other.shares) == [False, True, True]
    assert sum(other.workers) == WORKERS

    def p95_s(system: System) -> float:
        return float(np.percentile(systems.simulated_s(where, wanted, system, 1), 95))

    for workers in systems.allocations(other.shares, WORKERS):
        assert p95_s(other) <= p95_s(System("random", workers, other.thresholds, other.shares))


def test_a_forecast_of_an_idle_mesh_is_what_one_request_takes() -> None:
    """And more load means more latency, fewer requests within the SLO, the same engine time per request."""
    where, system = site(), systems.largest(3, WORKERS)

    def forecast(wanted: Demand) -> systems.Forecast:
        return systems.forecast(where, wanted.judged, wanted.arrival_s, system, SLO_S, 1)

    idle, busy = forecast(demand(rate=0.1)), forecast(demand(rate=2000.0))
    assert idle.p50_s == pytest.approx(idle.p95_s)
    assert idle.attained == 1
    assert busy.p95_s > 2 * idle.p95_s
    assert busy.attained < 1
    assert busy.engine_s == idle.engine_s


def test_a_plan_file_becomes_a_system() -> None:
    plan: dict[str, Any] = {
        "thresholds": [55.5, None],
        "tiers": [{"replicas": [{"tp": 1, "pp": 1, "count": 3}]}, {"replicas": []}, {"replicas": [{"count": 1}]}],
    }
    assert systems.of_plan(plan) == System("plan", (3, 0, 1), (55.5, SKIPPED))
    assert systems.of_plan(plan | {"skip_below": [20.0, None]}).skip_below == (20.0, None)


def test_what_is_passed_over_costs_nothing_and_counts_in_the_forecast() -> None:
    """A predictor that knows the answers: no engine time on the small tiers where they fail, and the same quality."""
    drawn = demand(rate=20.0)
    knowing = dataclasses.replace(drawn.judged, predicted=drawn.judged.scores)
    plain = System("plan", (1, 1, 2), (50.0, 50.0))
    skipping = System("plan", (1, 1, 2), (50.0, 50.0), skip_below=(50.0, 50.0))
    without, found = (
        systems.forecast(site(), knowing, drawn.arrival_s, system, SLO_S, 5) for system in (plain, skipping)
    )
    assert found.quality == pytest.approx(without.quality)
    assert found.engine_s < without.engine_s
    assert found.p95_s < without.p95_s


def outcome(latency_s: float, *, right: bool = True, tiers: tuple[str, ...] = ("small",)) -> Outcome:
    usage = Usage(30, 10, 40)
    work = tuple(TierSummary(t, t, "i", None, None, t == tiers[-1], usage, 0.1) for t in tiers)
    reply = Reply("42" if right else "no", (), (), FinishReason.STOP, tiers[-1], usage, work, 0.1, latency_s, "", "")
    return Outcome(Question("q", "42"), latency_s, reply, first_s=latency_s / 2)


def test_figures_of_a_run() -> None:
    """A request that failed is wrong and late. Work of all tiers counts; prompts without what was cached."""
    failed = Outcome(Question("q", "42"), 9.0, error="UNAVAILABLE: x")
    run = Run([outcome(0.5), outcome(2.0, right=False, tiers=("small", "large")), failed, outcome(0.7)], 10.0, 6.0)
    row = figures.run_figures(run, [90.0, 30.0, 90.0], rate_per_s=2.0, slo_s=1.0)
    assert (row["requests"], row["failed"]) == (4, 1)
    assert row["accuracy"] == 0.5
    assert row["judge_score"] == pytest.approx(70)
    assert row["quality"] == pytest.approx(200 / 3), "the right ones of those that were answered"
    assert row["goodput_per_s"] == pytest.approx(1.0)
    assert row["answers_per_s"] == pytest.approx(0.3)
    assert row["cpu_s_per_answer"] == pytest.approx(2.0)
    assert row["output_tokens_per_answer"] == pytest.approx(160 / 3)
    assert row["prompt_tokens_per_answer"] == pytest.approx(80 / 3)
    assert row["latency_p50_s"] == pytest.approx(0.7)
    assert row["first_visible_p50_s"] == pytest.approx(0.35)
    assert row["answered_by"] == {"large": pytest.approx(1 / 3), "small": pytest.approx(2 / 3)}
    assert row["errors"] == ["UNAVAILABLE: x"]


def test_intervals_are_students() -> None:
    """Of 1, 2, 3: the 97.5 % quantile of t with two degrees of freedom is 4.303, the standard error 1/sqrt(3)."""
    result = interval([1.0, 2.0, 3.0])
    assert result["mean"] == 2
    assert result["high"] - 2 == pytest.approx(4.3027 / np.sqrt(3), rel=1e-3)
    assert 2 - result["low"] == pytest.approx(result["high"] - 2)
    assert interval([7.0]) == {"mean": 7.0, "low": 7.0, "high": 7.0, "rounds": 1}


def test_rounds_with_short_tails_do_not_decide_what_a_forecast_is_worth() -> None:
    """A mean of errors by round says a third too much of a forecast that is right on average."""
    rows = [dict.fromkeys(figures.MEASURED, 1.0) | {"latency_p95_s": p95_s} for p95_s in (1.0, 3.0)]
    summary = figures.system_summary(rows, [systems.Forecast(1.0, 2.0, 1.0, 1.0, 1.0, 1.0)] * 2)
    assert summary["error_of_means"] == {"p50_s": 0.0, "p95_s": 0.0, "answers_per_s": 0.0}
    assert summary["forecast_error"]["p95_s"]["mean"] == pytest.approx(1 / 3)
