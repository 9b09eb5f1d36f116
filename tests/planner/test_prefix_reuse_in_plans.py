"""Prompt tokens that an engine has already: what plans count on, and what they compute all the same."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.brute_force import brute_force, instance, kinds, wanted_quality
from planner_service.demand import demand_of, draw_demand, workload_digest
from planner_service.deployment.saturation import saturated_per_s
from planner_service.deployment.search import LatencyTable, exhaustive_latency
from planner_service.routing.deployer import Deployer
from planner_service.routing.goals import least_latency
from planner_service.routing.grading import Arrivals, Grading, tier_load
from planner_service.routing.quality import JudgedSample
from planner_service.routing.solution import Proof
from planner_service.simulator import Dispatch, EngineLimits, Replica, Workload
from planner_service.site import Demand
from services.domain import InvalidRequest, StepLatencyModel
from services.domain.hardware import ReplicaShape

REPLICA = Replica(ReplicaShape(1, 1), StepLatencyModel.linear(0.005, 1e-4, 1e-7), 60_000, EngineLimits(64, 512))


def work_of(count: int, cached: int = 0, prompt: int = 1000, output: int = 50) -> Workload:
    whole = Workload(np.arange(float(count)) / 4, np.full(count, prompt), np.full(count, output))
    return replace(whole, cached_tokens=np.full(count, cached))


def sample_of(count: int = 40, cached: bool = True) -> JudgedSample:
    rng = np.random.default_rng(7)
    inputs = rng.integers(5, 900, count)
    return JudgedSample(
        ("small", "large"),
        inputs,
        rng.integers(1, 200, (count, 2)),
        rng.integers(0, 101, (count, 2)).astype(float),
        cached_tokens=inputs // 2 if cached else None,
    )


@pytest.mark.parametrize("cached", [[-1, 0], [0, 20], [0, 25], [0]])
def test_cached_tokens_that_cannot_be_are_named(cached: list[int]) -> None:
    """At least one token of a prompt is computed: its logits are needed."""
    with pytest.raises(InvalidRequest) as caught:
        Workload(np.zeros(2), np.array([10, 20]), np.array([1, 1]), cached_tokens=np.array(cached))
    assert [problem.field for problem in caught.value.problems] == ["workload.cached_tokens"]


def test_parts_of_workloads_and_samples_keep_what_is_cached() -> None:
    rows, sample = np.array([3, 1]), sample_of()
    work = replace(work_of(5), cached_tokens=np.arange(5))
    assert work.subset(rows[::-1]).cached_tokens.tolist() == [1, 3]
    assert work_of(3).subset(np.array([0])).cached_tokens.tolist() == [0]
    assert sample.cached_tokens is not None
    for part, expected in (
        (sample.subset(rows), rows),
        (sample.only([1]), range(40)),
        (sample.skipping([None]), range(40)),
    ):
        assert part.cached.tolist() == sample.cached_tokens[list(expected)].tolist()
    assert sample_of(cached=False).subset(rows).cached_tokens is None
    assert not sample_of(cached=False).cached.any()
    with pytest.raises(InvalidRequest, match="cached tokens must be 40 numbers"):
        replace(sample, cached_tokens=np.zeros(3, np.int64))


def test_what_is_sustained_grows_with_what_is_cached() -> None:
    """In step by arithmetic and by simulation; requests that take as much KV as before are no more at once."""
    figures = [
        (REPLICA.capacity_per_s(1000, 50, cached), saturated_per_s(REPLICA, work_of(40, cached)))
        for cached in (0, 500, 900)
    ]
    for (less, less_simulated), (more, more_simulated) in itertools.pairwise(figures):
        assert more > 1.3 * less
        assert more_simulated > 1.3 * less_simulated
    assert all(simulated == pytest.approx(arithmetic, rel=0.25) for arithmetic, simulated in figures)
    decodes = Replica(REPLICA.shape, StepLatencyModel.linear(0.02, 0.0, 0.0), 4200, REPLICA.limits)
    assert saturated_per_s(decodes, work_of(40, 900)) < 1.1 * saturated_per_s(decodes, work_of(40, 0))


def test_bounds_and_searches_count_with_what_is_cached() -> None:
    """A table of a workload with cached prompts: its best is that of every multiset, and no request is under its bound."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        inputs = rng.integers(5, 60, 40)
        work = Workload(
            np.cumsum(rng.exponential(0.03, 40)),
            inputs,
            rng.integers(2, 40, 40),
            cached_tokens=(rng.random(40) * inputs).astype(np.int64),
        )
        able = kinds(1.0)
        table = LatencyTable(work, able, Dispatch.ROUND_ROBIN, 95.0)
        best, every = table.best(3), exhaustive_latency(work, able, 3, Dispatch.ROUND_ROBIN, 95.0)
        assert (best is None) == (every is None)
        if best is None or every is None:
            continue
        assert best.latency_s == pytest.approx(every.latency_s)
        assert (table.times(best).finish_s >= table.alone_s() * (1 - 1e-9)).all()
        whole = LatencyTable(replace(work, cached_tokens=np.zeros(40, np.int64)), able, Dispatch.ROUND_ROBIN, 95.0)
        assert (table.alone_s() <= whole.alone_s() + 1e-12).all()
        assert table.alone_s().mean() < whole.alone_s().mean()


def test_the_optimum_of_a_cascade_is_brute_forces_with_cached_prompts() -> None:
    """And on the whole it is faster than without; single requests may be slower, as batches begin at other times."""
    latencies_s = []
    for seed in range(30):
        plain, sample = instance(seed, tiers=2 + seed % 2, count=5 + seed % 4, gpus=4)
        cached = (np.random.default_rng(seed).random(len(sample)) * sample.input_tokens).astype(np.int64)
        arrival_s = plain.workload(0, np.ones(len(sample), np.bool_)).arrival_s
        sample = replace(sample, cached_tokens=cached)
        deployer, wanted = Deployer(sample, arrival_s, plain.kinds, 4), wanted_quality(sample)
        least_s = brute_force(deployer, sample, wanted)
        if least_s == np.inf:
            continue
        found = least_latency(deployer, wanted)
        assert found.proof is Proof.ENUMERATED
        assert found.deployment.latency_s == pytest.approx(least_s), seed
        latencies_s.append((found.deployment.latency_s, least_latency(plain, wanted).deployment.latency_s))
    with_reuse, without = np.array(latencies_s).mean(axis=0)
    assert with_reuse < without


def test_tiers_reuse_prefixes_of_their_own_requests_and_not_of_grading_requests() -> None:
    sample, grading = sample_of(), Grading(1)
    rows = np.arange(40)
    own = Arrivals(rows, rows.astype(float))
    load = tier_load(sample, 1, own, grading, [(0, Arrivals(rows, own.at_s + 0.5))])
    assert load.work.cached_tokens[load.own].tolist() == sample.cached.tolist()
    assert not load.work.cached_tokens[~load.own].any()
    assert tier_load(sample, 0, own).work.cached_tokens.tolist() == sample.cached.tolist()
    assert not tier_load(sample_of(cached=False), 0, own).work.cached_tokens.any()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000))
def test_demand_has_the_tokens_or_the_shares_of_the_trace(seed: int) -> None:
    """Row by row, of an arrival's prompt as much is cached as of the trace's: in tokens or as a share, and never all."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(1, 3000, 60)
    trace = Workload(np.arange(60.0), inputs, rng.integers(1, 9, 60), cached_tokens=rng.integers(0, inputs))
    judged = sample_of(25, cached=False)
    by_trace = demand_of(trace, judged, requests=30, seed=seed, lengths="trace", rate=2.0).requests
    start = int(np.random.default_rng(seed).integers(0, 31))
    stretch = slice(start, start + 30)
    assert by_trace.cached.tolist() == trace.cached_tokens[stretch].tolist()
    by_quality = demand_of(trace, judged, requests=30, seed=seed, lengths="quality", rate=2.0).requests
    shares = trace.cached_tokens[stretch] / trace.input_tokens[stretch]
    assert (by_quality.cached <= shares * by_quality.input_tokens + 1e-9).all()
    assert (by_quality.cached > shares * by_quality.input_tokens - 1).all()
    assert (by_quality.cached < by_quality.input_tokens).all()


def test_other_cached_tokens_are_another_workload() -> None:
    trace, judged = work_of(50), sample_of(25, cached=False)

    def drawn(cached: int) -> Demand:
        of_trace = replace(trace, cached_tokens=np.full(50, cached))
        return demand_of(of_trace, judged, requests=30, seed=1, lengths="quality", rate=None)

    assert len({workload_digest(drawn(cached)) for cached in (0, 400, 800)}) == 3
    assert workload_digest(drawn(0)) == workload_digest(draw_demand(judged, drawn(0).arrival_s, 1))
