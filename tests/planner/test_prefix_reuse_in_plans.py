"""Prompt tokens that are cached: what plans count on, what they compute all the same, and what they say of it."""

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.brute_force import exhaustive_latency, kinds
from penstock.planner_service.deployment.saturation import saturated_per_s
from penstock.planner_service.deployment.search import LatencyTable
from penstock.planner_service.files.measured import read_trace, trace_of, workload_of
from penstock.planner_service.question.demand import demand_of, draw_demand, workload_digest
from penstock.planner_service.question.site import Demand
from penstock.planner_service.replay.slo_simulation import fewest_gpus, simulate_slos
from penstock.planner_service.routing.grading import Arrivals, Grading, tier_load
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.simulator import Dispatch, EngineLimits, Replica, Workload
from penstock.question_files.errors import FileError
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.planning import Trace
from penstock.types.ranges import range_problems
from tests.conftest import ROOT
from tests.planner.test_slo_simulation import CHAT, strategies
from tests.planner.test_slo_simulation import demand as slo_demand
from tests.planner.test_slo_simulation import site as slo_site
from tests.planner.test_slo_simulation import trace as slo_trace
from tests.support.cli import penstock
from tests.support.questions import asked, question, site_and_demand, with_prompts

run = partial(penstock, columns=400)

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


def test_parts_of_workloads_keep_what_is_cached() -> None:
    work = replace(work_of(5), cached_tokens=np.arange(5))
    assert work.subset(np.array([1, 3])).cached_tokens.tolist() == [1, 3]
    assert sample_of(cached=False).subset(np.array([3, 1])).cached_tokens is None
    assert not sample_of(cached=False).cached.any()


def test_what_is_sustained_grows_with_what_is_cached() -> None:
    """In step by arithmetic and by simulation; requests that take as much KV as before are no more at once."""
    figures = [
        (REPLICA.capacity_per_s(1000, 50, cached), saturated_per_s([REPLICA], work_of(40, cached))[0])
        for cached in (0, 500, 900)
    ]
    for (less, less_simulated), (more, more_simulated) in itertools.pairwise(figures):
        assert more > 1.3 * less
        assert more_simulated > 1.3 * less_simulated
    assert all(simulated == pytest.approx(arithmetic, rel=0.25) for arithmetic, simulated in figures)
    decodes = Replica(REPLICA.shape, StepLatencyModel.linear(0.02, 0.0, 0.0), 4200, REPLICA.limits)
    reused, whole = (saturated_per_s([decodes], work_of(40, cached))[0] for cached in (900, 0))
    assert reused < 1.1 * whole


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


def traced(path: Path, rows: list[str], header: str = "arrival_s,input_tokens,output_tokens,cached_tokens") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_trace_files_may_say_what_is_cached(tmp_path: Path) -> None:
    trace = read_trace(traced(tmp_path / "trace.csv", ["2,30,5,29", "1,20,5,0"]))
    assert trace.cached_tokens.tolist() == [0, 29]
    bare = read_trace(traced(tmp_path / "bare.csv", ["2,30,5"], "arrival_s,input_tokens,output_tokens"))
    assert bare.cached_tokens.tolist() == [0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("3,30,5,30", "line 3: cached_tokens must be less than input_tokens, 30, not 30"),
        ("3,30,5,-1", "line 3: cached_tokens must be a whole number at least 0, not -1"),
        ("3,30,5,1.5", "line 3: cached_tokens must be a whole number at least 0, not 1.5"),
        ("3,30,5,", "line 3: cached_tokens is missing"),
        ("3,30,5,1e30", "line 3: cached_tokens must be less than input_tokens, 30, not 1"),
        ("3,1e30,5,0", "trace.csv: line 3: input_tokens must be a whole number from 1 to 2,147,483,647, not 1"),
        ("3,30,1e19,0", "trace.csv: line 3: output_tokens must be a whole number from 1 to 2,147,483,647, not 1"),
    ],
)
def test_token_counts_of_a_file_that_cannot_be_are_named(tmp_path: Path, row: str, problem: str) -> None:
    with pytest.raises(FileError, match=problem):
        read_trace(traced(tmp_path / "trace.csv", ["2,30,5,29", row]))


def test_counts_of_messages_whose_products_would_overflow_are_named() -> None:
    """Messages hold 32 bits without a sign."""
    count, made = 2**32 - 1, question()
    inputs, outputs = list(made.trace.input_tokens), list(made.trace.output_tokens)
    inputs[7] = outputs[9] = count
    trace = replace(made.trace, input_tokens=tuple(inputs), output_tokens=tuple(outputs))
    prompts = list(made.quality.prompts)
    prompts[4] = replace(prompts[4], input_tokens=count, output_tokens=(1, count, 1))
    wrong = replace(made, trace=trace, quality=replace(made.quality, prompts=tuple(prompts)))
    problems = {each.field: each.problem for each in range_problems(wrong)}
    named = ("trace.input_tokens[7]", "trace.output_tokens[9]", "input_tokens", "output_tokens[1]")
    assert set(problems) == {*named[:2], *(f"quality.prompts[4].{name}" for name in named[2:])}
    assert "2,147,483,647, not 4,294,967,295" in problems[named[0]]


def test_the_largest_counts_of_messages_have_their_share_cached() -> None:
    most, made = 2**31 - 1, question()
    trace = replace(made.trace, input_tokens=(most,) * 300, cached_tokens=(most - 1,) * 300)
    _, demand = site_and_demand(with_prompts(replace(made, trace=trace), input_tokens=[most] * 100))
    assert demand.requests.cached.tolist() == [most - 1] * len(demand.requests)


def test_traces_of_rows_have_what_is_cached() -> None:
    work = workload_of(Trace.of([(0.0, 20, 3), (2.0, 40, 4, 39), (1.0, 30, 5, 7)]))
    assert work.cached_tokens.tolist() == [0, 7, 39]
    assert trace_of(work).cached_tokens == (0, 7, 39)
    assert trace_of(work.uncached()).cached_tokens == ()
    assert Trace.of([(0.0, 20, 3), (1.0, 20, 3, 0)]).cached_tokens == ()


@pytest.mark.slow
def test_the_command_says_what_it_assumed_and_can_leave_it_out(tmp_path: Path) -> None:
    """`ignore_cached` plans and simulates what the trace without the column does. Simulations do as the plan was made."""
    examples, out = ROOT / "examples", tmp_path / "plan.json"
    lines = (examples / "trace.csv").read_text().splitlines()[1:]
    rows = [f"{line},{int(line.split(',')[1]) * 3 // 4}" for line in lines]
    trace = traced(tmp_path / "cached.csv", rows)
    site = ("--cluster", examples / "cluster-1x8-h100.yaml", "--models", examples / "qwen2.5-cascade.yaml")
    how = ("--quality", examples / "judged.csv", "--min-quality", 75, "--rate", 20, "--gpus", 4)
    short = {"requests": 40, "runs": 0, "objective": "largest-tier"}

    def planned(trace: Path, **more: object) -> dict[str, Any]:
        done = run("plan", *asked(**short | more), *site, *how, "--trace", trace, "--out", out, "--json")
        assert done.returncode == 0, done.output
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    plan, bare, ignoring = planned(trace), planned(examples / "trace.csv"), planned(trace, ignore_cached=True)
    assert plan["cached_share"] == pytest.approx(0.745, abs=0.006)
    assert f"{plan['cached_share']:.0%} of the prompt tokens count as cached" in plan["verdict"]
    assert plan["latency"]["seconds"] < bare["latency"]["seconds"]
    assert (bare["cached_share"], bare["inputs"]["ignore_cached"]) == (0, False)
    assert (ignoring["cached_share"], ignoring["inputs"]["ignore_cached"]) == (0, True)
    assert "cached" not in ignoring["verdict"]
    same = [{k: v for k, v in each.items() if k not in ("inputs", "seconds")} for each in (bare, ignoring)]
    assert same[0] == same[1]
    shown = run("plan", *asked(**short), *site, *how, "--trace", trace)
    line = f"prefix reuse: {plan['cached_share']:.1%} of the prompt tokens are cached, as in the trace"
    assert line in shown.output

    def simulated(trace: Path, *more: object) -> dict[str, Any]:
        done = run("simulate", "--plan", out, "--trace", trace, "--requests", 40, "--rate", 20, "--json", *more)
        assert done.returncode == 0, done.output
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    assert json.loads(out.read_text())["inputs"]["ignore_cached"]
    assert simulated(trace) == simulated(examples / "trace.csv")
    found = simulated(trace, "--no-ignore-cached")
    planned(trace)
    assert simulated(trace) == found
    without = simulated(trace, "--ignore-cached")
    assert found["cached_share"] == plan["cached_share"]
    assert found["end_to_end_s"]["p95"] < without["end_to_end_s"]["p95"]
    assert without == simulated(examples / "trace.csv")
    text = run("simulate", "--plan", out, "--trace", trace, "--requests", 40, "--rate", 20).output
    assert line in text


def test_slos_are_simulated_without_reuse() -> None:
    """The attainment of a plan's classes, and the GPUs that a trace needs, are those of prompts computed whole."""
    work = slo_trace(60, 8.0)
    cached = replace(work, cached_tokens=work.input_tokens // 2)
    whole = slo_demand(work, 0.3)
    reusing = replace(whole, requests=replace(whole.requests, cached_tokens=cached.cached_tokens))
    results = [simulate_slos(slo_site(), each, (50.0,), strategies(1), [CHAT], 1) for each in (whole, reusing)]
    assert results[0] == results[1]
    assert fewest_gpus(slo_site(), 1, work, [CHAT], 0.5, 1) == fewest_gpus(slo_site(), 1, cached, [CHAT], 0.5, 1)
