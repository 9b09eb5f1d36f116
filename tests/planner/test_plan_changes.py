"""Sweeps and the verdict."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.planner_service.api import plans
from penstock.planner_service.files.hardware import gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.planning.sweep import Axis, SweepPoint, check_sweep, sweep_values
from penstock.planner_service.planning.verdict import next_step, verdict
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.routing.quality import JudgedSample
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ClusterSpec
from tests.support.plain_plans import plain_options, plan_cascade
from tests.support.present import present
from tests.support.questions import question


@pytest.fixture(scope="module")
def site() -> Site:
    models = (model_of_catalogue("llama-3.1-8b"), model_of_catalogue("llama-3.1-70b"))
    cluster = ClusterSpec(gpu_of_catalogue("h100"), 1, 8, 25e9, 3.0)
    return Site(cluster, ("small", "large"), models)


@pytest.fixture(scope="module")
def demand(site: Site) -> Demand:
    rng = np.random.default_rng(5)
    scores = np.column_stack([rng.uniform(20, 90, 80), np.full(80, 90.0)])
    judged = JudgedSample(site.tiers, rng.integers(50, 400, 80), rng.integers(20, 200, (80, 2)), scores)
    return Demand(judged, judged, np.cumsum(rng.exponential(0.2, 80)))


@pytest.mark.slow
def test_a_sweep_has_a_plan_or_a_reason_for_every_value() -> None:
    asked = question(min_quality=80, allow_overload=False)

    def points(axis: Axis, *values: float) -> Sequence[SweepPoint]:
        return plans.sweep(asked, axis, values, lambda *_: None).points

    rates = points(Axis.RATE, 2.5, 5.0, 5000.0)
    assert [point.plan is None for point in rates] == [False, False, True]
    assert "rate binds" in rates[2].reason
    assert present(rates[0].plan).rate_per_s == pytest.approx(2.5)
    qualities = points(Axis.QUALITY, 60.0, 80.0, 99.0)
    assert [point.plan.quality >= point.value for point in qualities if point.plan] == [True, True]
    assert "min quality binds" in qualities[2].reason
    gpus = points(Axis.GPUS, 16.0, 24.0)
    assert [point.plan.gpus <= point.value for point in gpus if point.plan] == [True, True]
    options = plain_options(min_quality=80.0)
    assert sweep_values(Axis.GPUS, options, 1.0, (0, 1), 8)[-1] == 8
    for axis, value, problem in (
        (Axis.RATE, 0.0, "over 0"),
        (Axis.GPUS, 2.5, "whole"),
        (Axis.QUALITY, 101.0, "from 0 to 100"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            check_sweep(axis, [value])


@pytest.mark.slow
def test_the_verdict_says_gpus_what_breaks_first_and_the_next_step(site: Site, demand: Demand) -> None:
    options = plain_options(min_quality=70.0, max_latency_s=8.0, max_utilisation=0.75)
    demand = demand.scaled(8.0)
    plan = plan_cascade(site, demand, options)
    assert plan.quality < 89
    step = next_step(plan, demand, options, lambda demand, options: plan_cascade(site, demand, options))
    more = plan_cascade(site, demand, dataclasses.replace(options, min_quality=plan.quality + 1))
    assert step.gpus == more.gpus - plan.gpus
    text = verdict(site, plan, step)
    assert text.startswith(
        f"{plan.gpus} of 8 GPUs for {3 * plan.gpus:.2f} dollars per hour; {present(plan.load).tier} breaks first"
    )
    assert "1 point more quality costs" in text
    best = plan_cascade(site, demand, dataclasses.replace(options, min_quality=90.0))
    none = next_step(best, demand, options, lambda demand, options: plan_cascade(site, demand, options))
    assert "min quality binds" in none.reason
    assert "no plan has a quality of 91.0" in verdict(site, best, none)
