"""Length stages: the partition against brute force, the sample of lengths in flight, the QoE model of a known replica."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.planner_service.files.profiles import (
    IDENTIFIED,
    Profile,
    context_uncertainty,
    fit_qoe,
    qoe_errors,
    read_profile,
    write_profile,
)
from penstock.planner_service.files.stage_replica import read_replica
from penstock.planner_service.simulator import EngineLimits, Replica, Workload
from penstock.planner_service.simulator.cluster import Cluster, Moves
from penstock.planner_service.simulator.loop import serve_on
from penstock.planner_service.simulator.policies import LeastWork
from penstock.planner_service.stages.partition import Problem, exponential_cuts, plan_stages, with_layout
from penstock.planner_service.stages.profile import batches_of
from penstock.planner_service.stages.sample import LengthSample, count_in_flight, in_flight
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.stages.qoe import BatchLoad, InFlight, batch_quality, request_cost_s
from penstock.types.plans import QoeModel, Stage
from tests.support.tables import write_trace

QOE = QoeModel(0.006, 3e-5, 1e-8, 3e-12, 5e-8)
MOVE = Moves(100_000, 1e10)


def random_sample(rng: np.random.Generator, most: int = 60) -> LengthSample:
    n = int(rng.integers(1, most))
    inputs = rng.lognormal(4, 1.2, n).astype(np.int64) % 900 + 1
    outputs = rng.integers(1, 120, n)
    return LengthSample.of(inputs + rng.integers(0, outputs + 1), inputs, outputs)


def every_layout(instances: int, points: list[int]) -> Iterator[list[Stage]]:
    for stages in range(1, min(instances, len(points) - 1) + 1):
        for inner in itertools.combinations(range(1, len(points) - 1), stages - 1):
            bounds = [0, *(points[i] for i in inner), points[-1]]
            for marks in itertools.combinations(range(1, instances), stages - 1):
                counts = np.diff([0, *marks, instances])
                yield [Stage(a, b, int(k)) for a, b, k in zip(bounds, bounds[1:], counts, strict=False)]


def quality(layout: list[Stage], sample: LengthSample, qoe: QoeModel, move: Moves) -> float:
    """The objective of section 4.2 word for word, from the vocabulary that all parts share."""
    held = [InFlight(int(t), int(i)) for t, i in zip(sample.tokens, sample.input_tokens, strict=True)]
    total = 0.0
    for stage in layout:
        mine = [s for s in held if stage.from_tokens <= s.tokens < stage.to_tokens]
        parts = max(1, min(stage.instances, len(mine)))
        total += parts * batch_quality(qoe, BatchLoad(*(whole / parts for whole in BatchLoad.of(mine))))
        for i, o in zip(sample.input_tokens, sample.output_tokens, strict=True):
            if stage.from_tokens and i < stage.from_tokens <= i + o:
                total += stage.from_tokens * move.token_s / o
    return total


def test_the_partition_equals_brute_force() -> None:
    rng = np.random.default_rng(5)
    for case in range(220):
        sample, instances = random_sample(rng), int(rng.integers(1, 6))
        qoe = QoeModel(*(rng.uniform(0, 1, 5) * np.array([1, 1e-2, 1e-4, 1e-7, 1e-3]) + 1e-12))
        move = Moves(float(rng.uniform(0, 2000)), 1e5)
        points = np.unique([0, *rng.integers(1, 1100, int(rng.integers(1, 5))), 1100]).astype(np.int64)
        problem = Problem(sample, qoe, instances, move, points)
        best = min(quality(layout, sample, qoe, move) for layout in every_layout(instances, points.tolist()))
        found = problem.exact()
        assert problem.total(found) == pytest.approx(best, rel=1e-9), case
        assert quality(list(problem.layout(found).stages), sample, qoe, move) == pytest.approx(best, rel=1e-9), case
        assert problem.layout(found).instances == instances


def test_a_plan_says_what_it_is_held_against() -> None:
    rng = np.random.default_rng(3)
    sample = random_sample(rng, 400)
    exact = plan_stages(sample, QOE, 4, 2048, MOVE)
    assert exact.gap == 0
    assert exact.quality <= exact.one_stage_quality
    kept = with_layout(exact, None, sample, QOE, MOVE)
    assert len(kept.layout.stages) == 1
    assert kept.gap == pytest.approx(kept.one_stage_quality / exact.quality - 1)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        plan_stages(sample, QOE, 4, int(sample.tokens[-1]), MOVE)
    with pytest.raises(InvalidRequest, match="instances"):
        plan_stages(sample, QOE, 0, 2048, MOVE)


def test_cut_points_grow_exponentially() -> None:
    assert exponential_cuts(20, 1).tolist() == [0, 1, 2, 4, 8, 16, 20]
    assert exponential_cuts(1).tolist() == [0, 1]
    assert len(exponential_cuts(131_072)) == 35


def test_sequences_in_flight_are_the_traces_output_tokens() -> None:
    """Every output token of the trace, once each: that is who is in flight if all tokens take as long."""
    work = Workload(np.array([0.0, 1.0]), np.array([10, 4]), np.array([2, 3]))
    sample = in_flight(work, 5)
    assert sample.tokens.tolist() == [5, 6, 7, 11, 12]
    assert sample.input_tokens.tolist() == [4, 4, 4, 10, 10]
    assert sample.output_tokens.tolist() == [3, 3, 3, 2, 2]


def test_littles_law_counts_them_and_the_engine_bounds_them() -> None:
    work = Workload(np.arange(100) / 10.0, np.full(100, 50), np.full(100, 200))
    fixed = QoeModel(0.01, 0, 0, 0, 0)
    replica = Replica(ReplicaShape(1, 1), StepLatencyModel.linear(0.01, 0, 0), 3200, EngineLimits(max_running=1000))
    assert count_in_flight(work, fixed, 4, replica) == pytest.approx(10 * 200 * 0.01, abs=1)
    assert count_in_flight(work, QoeModel(0.01, 0.1, 0, 0, 0), 2, replica) == round(2 * 3200 / 150)


def test_the_qoe_fit_finds_its_model_and_predicts_a_known_replicas_batches() -> None:
    rng = np.random.default_rng(4)
    loads = [
        BatchLoad(n, n * 100.0 * s, n * 1e4 * s * s, n * 300.0 * s) for n in (1, 2, 4, 8, 16) for s in (1, 3, 9, 27)
    ]
    samples = [(load, request_cost_s(QOE, load) * rng.normal(1, 0.002)) for load in loads]
    fitted = fit_qoe(samples)
    for load in loads:
        assert request_cost_s(fitted, load) == pytest.approx(request_cost_s(QOE, load), rel=0.02)
    assert min(fitted.coefficients) >= 0
    with pytest.raises(InvalidRequest, match="samples"):
        fit_qoe(samples[:4])
    latency = StepLatencyModel((1.0, 64.0, 512.0, 2048.0), (0.004, 0.0042, 0.006, 0.02), 4e-8, 1e-10)
    replica = Replica(ReplicaShape(1, 1), latency, 400_000, EngineLimits(256, 2048))
    inputs, outputs = rng.integers(20, 12_000, 500), rng.integers(50, 900, 500)
    batches = batches_of(replica, Workload(np.arange(500.0), inputs, outputs))
    errors = np.abs(qoe_errors(fit_qoe(batches[::2]), batches[1::2]))
    assert errors.mean() < 0.35
    assert max(load.tokens for load, _ in batches) <= 400_000


def batches_by_share(shares: tuple[float, ...], noise: float) -> list[tuple[BatchLoad, float]]:
    """Of n requests of one final length, the input being a share of it; the cost is a known model's, with noise."""
    rng, samples = np.random.default_rng(3), []
    for n in (1, 2, 4, 8, 16, 32):
        for final in (128.0, 512.0, 2048.0):
            for share in shares:
                inputs = share * final
                load = BatchLoad(n, n * inputs, n * inputs**2, n * (inputs + final) / 2)
                samples.append((load, request_cost_s(QOE, load) * rng.normal(1, noise)))
    return samples


def test_the_cost_of_lengths_so_far_is_found_where_inputs_vary_by_themselves() -> None:
    """Within a few percent from batches whose inputs are a tenth to nine tenths of one length."""
    samples = batches_by_share((0.1, 0.3, 0.5, 0.7, 0.9), 0.01)
    model = fit_qoe(samples)
    assert model.context_token_s == pytest.approx(QOE.context_token_s, rel=0.05)
    assert context_uncertainty(model, samples) <= IDENTIFIED


def test_where_lengths_follow_from_inputs_the_fit_says_that_it_does_not_know() -> None:
    """Not 0 in silence: with inputs of one share nothing tells D4 from D2, nearly nothing with two shares that are close."""
    alike = batches_by_share((0.5,), 0.01)
    assert context_uncertainty(fit_qoe(alike), alike) == float("inf")
    close = batches_by_share((0.49, 0.51), 0.05)
    assert context_uncertainty(fit_qoe(close), close) > IDENTIFIED
    few = batches_by_share((0.1, 0.9), 0.01)[:5]
    assert context_uncertainty(fit_qoe(few), few) == float("inf")


@pytest.mark.parametrize("uncertainty", [None, 0.04, float("inf")])
def test_a_profile_keeps_what_is_not_known_of_its_model(tmp_path: Path, uncertainty: float | None) -> None:
    replica = Replica(ReplicaShape(1, 1), StepLatencyModel.linear(0.01, 0, 0), 3200, EngineLimits())
    profile = Profile("m", "torch", "here", replica, (), 0.0, qoe=QOE, context_uncertainty=uncertainty)
    write_profile(tmp_path / "profile.json", profile)
    assert read_profile(tmp_path / "profile.json") == profile
    work = Workload(np.zeros(2), np.array([10, 110]), np.array([5, 5]))
    measured = read_replica(tmp_path / "profile.json", "", "", work)
    assert measured.source.endswith("D4 not identified") == (uncertainty == float("inf"))


def test_unlike_lengths_in_a_batch_cost_what_was_measured() -> None:
    """In a simulated cluster: gap_s for every token by which the shorter one of two is shorter, at each step of both."""
    work = Workload(np.zeros(2), np.array([10, 110]), np.array([5, 5]))
    finish = []
    for gap_s in (0.0, 1e-5):
        latency = StepLatencyModel((0.0, 1.0), (0.005, 0.00501), 1e-7, 0.0, gap_s)
        one = Replica(ReplicaShape(1, 1), latency, 3200, EngineLimits(8, 512, 16))
        finish.append(serve_on(Cluster(work, [one], Moves(1e5, 1e10)), LeastWork).finish_s)
    assert finish[1] - finish[0] == pytest.approx(np.full(2, 4 * 100 * 1e-5))


@pytest.mark.slow
def test_stages_from_the_command_line(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    trace, out = tmp_path / "trace.csv", tmp_path / "layout.json"
    lengths = zip(rng.lognormal(6, 1.5, 300).astype(int) + 1, rng.integers(1, 400, 300), strict=True)
    write_trace(trace, ((i / 20, a, b) for i, (a, b) in enumerate(lengths)))
    command = ["stages", "--instances", "8", "--trace", str(trace), "--out", str(out)]
    done = CliRunner().invoke(app, [*command, "--rate", "90", "--plot", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said == json.loads(out.read_text())
    assert list(said) == [
        "stages",
        "quality",
        "one_stage_quality",
        "method",
        "gap",
        "seconds",
        "verdict",
    ]
    assert sum(stage["instances"] for stage in said["stages"]) == 8
    assert said["stages"][0]["from_tokens"] == 0
    assert said["verdict"]["use_stages"] == (len(said["stages"]) > 1)
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in out.with_suffix(".svg").read_text()
    (tmp_path / "empty").mkdir()
    with contextlib.chdir(tmp_path / "empty"):
        quiet = CliRunner().invoke(app, [*command[:-2], "--json"])
    assert quiet.exit_code == 0, quiet.output
    assert not list((tmp_path / "empty").iterdir())
    assert CliRunner().invoke(app, [*command[:-2], "--plot"]).exit_code == 2
    for more, fault in (
        (["--gpu", "abacus"], "gpu: no 'abacus' in the catalogue"),
        (["--method", "guess"], "--method"),
        (["--max-tokens", "10"], "--max-tokens must exceed"),
        (["--profile", str(trace)], "not a profile"),
        (["--gpu", "l4", "--model", "llama-3.1-70b"], "for its weights"),
    ):
        done = CliRunner().invoke(app, [*command, "--no-plot", *more])
        assert done.exit_code == 2, done.output
        assert fault in " ".join(done.output.split()), done.output
    trace.write_text(trace.read_text().replace("\n0.15,", "\n0.15,many,"))
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, "line 5: input_tokens 'many'" in " ".join(done.output.split())) == (2, True), done.output
