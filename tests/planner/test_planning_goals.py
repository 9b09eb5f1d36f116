"""What is asked of a plan beyond the slowest tier: cost, rate, end-to-end targets, stretches that last, other stretches."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.planning.horizon import ENOUGH_LATENCIES, plan_over_horizon
from penstock.planner_service.planning.verdict import verdict
from penstock.planner_service.question.demand import continued, demand_of, draw_demand
from penstock.planner_service.question.planning_options import LEAST_REQUESTS, Goal, Options
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.repeated_runs import interval_of
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import Workload
from penstock.services.domain.errors import InvalidRequest
from penstock.types.planned import Interval
from penstock.types.planning import Objective
from tests.conftest import ROOT
from tests.support.inputs import read_quality, read_site
from tests.support.plain_plans import plain_options, plan_cascade
from tests.support.present import present

EXAMPLES = ROOT / "examples"
GPUS, RATE, QUALITY = 16, 4.0, 75.0
Inputs = tuple[Site, Workload, JudgedSample]


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    base = read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")
    site = dataclasses.replace(base, cluster=dataclasses.replace(base.cluster, nodes=GPUS // 8))
    return site, read_trace(EXAMPLES / "trace.csv"), read_quality(EXAMPLES / "judged.csv", base.tiers)


def drawn(inputs: Inputs, seed: int = 1, requests: int = 120) -> Demand:
    return demand_of(inputs[1], inputs[2], requests=requests, seed=seed, lengths="quality", rate=RATE)


@pytest.mark.slow
def test_with_a_quality_alone_the_cheapest_plan_is_as_fast_as_the_largest_model(inputs: Inputs) -> None:
    """On one GPU less that model does not sustain the rate; the plan takes fewer, and at most 1.2 times its latency. What the
    plan says of the best of other tiers costs more."""
    site, demand = inputs[0], drawn(inputs)
    plan = plan_cascade(site, demand, Options(min_quality=QUALITY))
    alone, choice = present(plan.largest_alone), present(plan.choice)
    assert plan.load is not None
    assert plan.goal is Goal.COST
    assert alone.limit_s == pytest.approx(1.2 * alone.latency_s)
    assert plan.felt_s <= alone.limit_s
    assert plan.quality >= QUALITY
    assert max(plan.utilisation) <= 0.75
    assert plan.gpus < alone.cost.gpus
    assert alone.tier == "large"
    last, large = site.only([2]), demand.only([2])
    how = plain_options(min_quality=0.0, objective=Objective.END_TO_END, max_utilisation=0.75)
    with pytest.raises(Unreachable):
        plan_cascade(last, large, how, gpus=alone.cost.gpus - 1)
    assert [tier.name for tier in plan.tiers] == list(site.tiers)
    assert choice.runner_up is None or choice.runner_up.cost.gpus >= plan.gpus
    sentence = verdict(site, plan)
    assert f"than large alone, which takes {alone.cost.gpus} GPUs" in sentence
    assert "warning" not in sentence
    idle = plan_cascade(site, demand.scaled(0.001), Options(min_quality=QUALITY))
    assert "warning: the rate is" in verdict(site, idle)


@pytest.mark.slow
def test_a_larger_cluster_is_assumed_for_the_largest_model_where_there_is_too_little(inputs: Inputs) -> None:
    """The model fits no four GPUs; the plan keeps to those."""
    base, demand = inputs[0], drawn(inputs)
    site = dataclasses.replace(base, cluster=dataclasses.replace(base.cluster, nodes=1, gpus_per_node=4))
    plan = plan_cascade(site, demand, Options(min_quality=0.0))
    alone = present(plan.largest_alone)
    assert alone.assumed
    assert alone.tier == "large"
    assert plan.gpus <= site.gpus < alone.cost.gpus
    assert "more than there are" in verdict(site, plan)


def test_a_latency_target_holds_on_other_stretches(inputs: Inputs) -> None:
    """Planned without them, the plan misses its target there; with them, the mean of their p95 is within it."""
    site, demand = inputs[0], drawn(inputs, requests=60)
    runs = [drawn(inputs, seed, 240) for seed in (2, 3, 4)]
    targets = plain_options(min_quality=QUALITY, max_latency_s=14.0)
    alone = plan_cascade(site, demand, targets)
    plan = plan_cascade(site, demand, targets, runs=runs)
    assert alone.latency_interval is None
    interval = present(plan.latency_interval)
    assert interval.runs == 3
    assert interval.low <= interval.mean <= 14.0
    assert plan.gpus >= alone.gpus


def test_a_stretch_lasts_several_latencies(inputs: Inputs) -> None:
    """Requests are chosen by rate and latency: at twice the rate about twice as many; a number that is given is taken."""
    site, trace, judged = inputs

    def planned(rate: float, requests: int | None = None) -> int:
        options = plain_options(min_quality=QUALITY, requests=requests, seed=1, rate=rate, runs=1)
        plan, demand = plan_over_horizon(
            lambda demand, runs: plan_cascade(site, demand, options, runs=runs), site, trace, judged, options
        )
        assert plan.requests == len(demand.arrival_s)
        if requests is None:
            assert plan.seconds >= ENOUGH_LATENCIES * plan.latency_p95_s
        return plan.requests

    assert planned(8.0) > 1.5 * planned(4.0)
    assert planned(8.0, 50) == 50


def test_where_a_search_over_enough_requests_takes_too_long_the_plan_is_run_on_longer_stretches(inputs: Inputs) -> None:
    site, trace, judged = inputs
    options = plain_options(min_quality=QUALITY, seed=1, rate=40.0, runs=2)
    stretches = list[Sequence[Demand]]()

    def planned(demand: Demand, runs: Sequence[Demand]) -> CascadePlan:
        stretches.append((demand, *runs))
        return plan_cascade(site, demand, options, runs=runs)

    plan, demand = plan_over_horizon(planned, site, trace, judged, options)
    assert plan.seconds < ENOUGH_LATENCIES * plan.stay_s <= plan.runs_s
    assert plan.stay_s == present(plan.latency_interval).mean
    assert stretches[-1][0] is demand
    assert min(run.seconds for run in stretches[-1][1:]) == plan.runs_s
    assert [run.rate_per_s for run in stretches[-1]] == pytest.approx([40.0] * 3)


def test_a_short_trace_is_read_over_and_over(inputs: Inputs) -> None:
    """A cheapest plan is made for several latencies, though the trace ends before; at its rate, with its lengths in turn."""
    site, trace, judged = inputs
    short = trace.subset(np.arange(LEAST_REQUESTS + 10))
    options = plain_options(min_quality=QUALITY, goal=Goal.COST, rate=8.0, runs=1)
    plan, _ = plan_over_horizon(
        lambda demand, runs: plan_cascade(site, demand, options, runs=runs), site, short, judged, options
    )
    assert plan.requests > len(short)
    assert plan.seconds >= ENOUGH_LATENCIES * plan.felt_s
    assert plan.runs_s > 1.5 * plan.seconds
    long = continued(short, 3 * len(short))
    assert len(long) >= 3 * len(short)
    assert long.rate_per_s == pytest.approx(short.rate_per_s)
    assert (long.output_tokens[len(short) :] == long.output_tokens[: -len(short)]).all()


def test_an_interval_is_students() -> None:
    interval = interval_of([6.4, 7.0, 8.1, 9.0, 7.5])
    assert interval.mean == pytest.approx(7.6)
    assert interval.high - interval.mean == pytest.approx(
        2.776 * np.std([6.4, 7.0, 8.1, 9.0, 7.5], ddof=1) / 5**0.5, rel=1e-3
    )
    assert interval_of([3.0]) == Interval(3.0, 3.0, 3.0, 1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (plain_options(max_latency_s=2, goal=Goal.LATENCY), "min_quality"),
        (plain_options(min_quality=80, goal=Goal.RATE), "max_latency_s"),
        (plain_options(min_quality=80, percentile=99.9), "requests"),
    ],
)
def test_options_that_do_not_go_together_are_named(inputs: Inputs, options: Options, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan_cascade(inputs[0], drawn(inputs), options)
    assert [problem.field for problem in caught.value.problems] == [field]


def test_arrivals_all_at_once_have_no_rate_to_raise(inputs: Inputs) -> None:
    site, _, judged = inputs
    burst = draw_demand(judged, np.zeros(40), seed=1)
    with pytest.raises(InvalidRequest, match="rate"):
        plan_cascade(site, burst, min_quality=QUALITY, max_latency_s=30.0, goal=Goal.RATE)
    assert plan_cascade(site, burst, min_quality=QUALITY, max_utilisation=0.75).load is None
