"""The engine's CPU in step times, and the bands of step times that are estimated."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from penstock.planner_service.api import plans
from penstock.planner_service.files.catalogue import catalogue
from penstock.planner_service.files.hardware import engine_of_catalogue, gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.files.site import site_of
from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.planning.latency_band import latency_band, over_band
from penstock.planner_service.question.planning_options import Options
from penstock.planner_service.question.site import Demand
from penstock.planner_service.simulator import Replica, Workload, serve
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ClusterSpec, EngineSpec, ReplicaShape, Runtime, roofline
from penstock.services.domain.latency import EngineCpu, StepLatencyModel, StepLoad
from penstock.types.planned import Cost, LatencyBand
from penstock.types.planning import EngineRuntime, Goal, Objective
from tests.support.present import present
from tests.support.questions import question

ONE = ReplicaShape(1, 1)
WAITS = EngineCpu(0.004, 0.001, 0.02)
OVERLAPS = dataclasses.replace(WAITS, overlapped=True)


def on(gpu: str, cpu: EngineCpu) -> StepLatencyModel:
    """A small model on such a GPU."""
    cluster = ClusterSpec(gpu_of_catalogue(gpu), 1, 1, 1.0)
    return roofline(model_of_catalogue("llama-3.2-1b"), ONE, cluster, Runtime(engine=EngineSpec("one", cpu)))


def test_a_step_waits_for_the_cpu_or_takes_as_long_as_the_slower() -> None:
    load = StepLoad(40, 9000, requests=8, prompts=2)
    kernels_s, cpu_s = on("a100-80gb", EngineCpu()).step_s(load), 0.004 + 8 * 0.001 + 2 * 0.02
    assert on("a100-80gb", WAITS).step_s(load) == pytest.approx(kernels_s + cpu_s)
    assert on("a100-80gb", OVERLAPS).step_s(load) == pytest.approx(cpu_s)  # of so small a model
    long = dataclasses.replace(load, context_tokens=10_000_000)
    assert on("a100-80gb", OVERLAPS).step_s(long) == on("a100-80gb", EngineCpu()).step_s(long)


def test_without_a_count_of_requests_decodes_take_as_long_and_nothing_less() -> None:
    for cpu in (WAITS, OVERLAPS):
        model = on("a100-80gb", dataclasses.replace(cpu, prompt_s=0.0))
        plain = model.by_tokens(64)
        assert plain.cpu == EngineCpu()
        for tokens in (1, 8, 64):  # knots
            assert plain.step_s(StepLoad(tokens, 0)) == pytest.approx(
                model.step_s(StepLoad(tokens, 0, requests=tokens))
            )
        for tokens in (100, 700):  # with prompts: fewer requests than tokens
            counted = model.step_s(StepLoad(tokens, 5000, 1e5, requests=30))
            assert plain.step_s(StepLoad(tokens, 5000, 1e5)) >= counted - 1e-12
    assert StepLatencyModel.linear(0.01, 1e-4, 0.0).by_tokens(64).knot_tokens == (0.0, 1.0)


def test_simulated_replies_are_as_fast_as_the_cpu() -> None:
    """32 requests of a model whose kernels take less: a token each 4 + 32 ms, a prompt each 20 ms once."""
    work = Workload(np.zeros(32), np.full(32, 16), np.full(32, 101))
    served = serve(work, [Replica(ONE, on("a100-80gb", OVERLAPS), 100_000)])
    assert served.first_s == pytest.approx(0.004 + 32 * 0.021)
    assert served.finish_s - served.first_s == pytest.approx(100 * 0.036)


def test_engines_of_the_catalogue_are_sound() -> None:
    for name in catalogue("engines"):
        engine = engine_of_catalogue(name)
        assert engine.name == name
        assert engine.fast < 1 < engine.slow
        assert engine.cpu.step_s > 0
    assert EngineRuntime().engine in catalogue("engines")


def asking(**runtime: Any) -> Any:
    asked = question()
    return dataclasses.replace(asked, models=dataclasses.replace(asked.models, runtime=EngineRuntime(**runtime)))


def test_a_question_names_its_engine() -> None:
    asked = asking(engine="vllm-0.5")
    site = site_of(asked.cluster, asked.models)
    assert site.runtime.engine == engine_of_catalogue("vllm-0.5")
    replica, _ = site.replica(0, ONE, 1000)
    assert present(replica).latency.cpu == site.runtime.engine.cpu.scaled(0.5)  # of the machines that have H100
    asked = asking(engine="vllm-0.1")
    with pytest.raises(InvalidRequest, match=r"models\.runtime\.engine: no 'vllm-0\.1' in the catalogue: sglang, vllm"):
        site_of(asked.cluster, asked.models)


def test_a_plan_says_the_band_of_its_estimates() -> None:
    """With hardly any load, the latency of one tier is scaled as its step times are. With profiles there is no band."""
    asked = dataclasses.replace(
        question(rate=0.05), objective=Objective.END_TO_END, min_quality=70.0, goal=Goal.LATENCY
    )
    planned = plans.plan(asked)
    plan = planned.report()
    used = [tier for tier in plan.tiers if tier.used]
    assert {str(tier.step_times) for tier in used} == {
        "estimated in 16bit, for sglang (measured: 0.9 to 1.6 times as long)"
    }
    latency = present(plan.latency)
    band = present(latency.band)
    assert (band.fast_s, band.slow_s) == pytest.approx((0.9 * latency.seconds, 1.6 * latency.seconds))
    site = planned.candidates
    profile = Replica(ONE, StepLatencyModel.linear(0.01, 1e-4, 0.0), 100_000)
    measured = dataclasses.replace(site, measured=((profile,),) * len(site.tiers))
    assert latency_band(measured, planned.plan, planned.offered) is None


def cheapest() -> plans.Planned:
    asked = dataclasses.replace(question(rate=2.0), objective=Objective.END_TO_END, min_quality=70.0, goal=Goal.COST)
    return plans.plan(asked)


@pytest.mark.slow
def test_a_plan_that_holds_all_over_the_band_is_taken_if_it_costs_no_more_and_else_said() -> None:
    planned = cheapest()
    plan, demand = planned.plan, planned.offered
    limit_s = 1.1 * plan.felt_s
    options = dataclasses.replace(planned.options, max_latency_s=limit_s)
    other = dataclasses.replace(plan, felt_s=0.5 * limit_s)
    bands = {plan.felt_s: LatencyBand(plan.felt_s, 1.3 * limit_s), other.felt_s: LatencyBand(1.0, 0.9 * limit_s)}

    def band_of(plan: CascadePlan, _: Demand) -> LatencyBand:
        return bands[plan.felt_s]

    within = []

    def again(options: Options) -> tuple[CascadePlan, Demand]:
        within.append(options.max_latency_s)
        return other, demand

    assert over_band((plan, demand), options, again, band_of) == ((other, demand), bands[other.felt_s])
    assert within == [pytest.approx(plan.felt_s / 1.3, rel=0.03)]  # by as much as the slow end was over the target
    other = dataclasses.replace(other, dollars_per_hour=plan.cost + 8.0)
    kept = over_band((plan, demand), options, again, band_of)
    missed = dataclasses.replace(bands[plan.felt_s], missed=True)
    said = dataclasses.replace(missed, kept_for=Cost(other.gpus, other.dollars_per_hour))
    assert kept == ((plan, demand), said)
    bands[other.felt_s] = LatencyBand(1.0, 1.01 * limit_s)  # no plan is found that holds there
    assert over_band((plan, demand), options, again, band_of) == ((plan, demand), missed)


@pytest.mark.slow
def test_a_target_of_its_own_is_not_looked_at_twice() -> None:
    """What a cheapest plan keeps to without a target is a multiple of an estimate, which the band scales as well."""
    planned = cheapest()

    def again(_: Options) -> tuple[CascadePlan, Demand]:
        raise AssertionError

    options = dataclasses.replace(planned.options, max_latency_s=None)
    found = planned.plan, planned.offered
    assert over_band(found, options, again, lambda *_: planned.band) == (found, planned.band)
    assert present(planned.band).kept_for is None


@pytest.mark.slow
def test_a_stated_target_is_looked_at_at_the_slow_end() -> None:
    """Of a real search: as estimated the plan keeps the target; at the slow end it does, or it says what would."""
    planned = cheapest()
    limit_s = (planned.plan.felt_s + present(planned.band).slow_s) / 2
    asked = dataclasses.replace(
        question(rate=2.0), objective=Objective.END_TO_END, min_quality=70.0, max_latency_s=limit_s
    )
    tight = plans.plan(asked)
    band = present(tight.band)
    assert tight.plan.felt_s <= limit_s
    assert band.slow_s <= limit_s or present(band.kept_for).gpus > tight.plan.gpus
