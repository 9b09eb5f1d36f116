"""Length stages are chosen by replay: no layout is proposed that cannot be served, none is favoured that does not help."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import penstock.planner_service.stages.replay as stage_replay
from penstock.cli.main import app
from penstock.planner_service.simulator import EngineLimits, Replica, Workload
from penstock.planner_service.simulator.cluster import Cluster, Moves
from penstock.planner_service.simulator.loop import serve_on
from penstock.planner_service.simulator.policies import LeastWork
from penstock.planner_service.simulator.staged import Staged
from penstock.planner_service.stages.proposals import KV_SHARE, balanced, fits, propose, stage_seconds
from penstock.planner_service.stages.replay import (
    MARGIN,
    MIN_GAIN,
    Replayer,
    figures_of,
    is_stable,
    judge,
    lasting,
)
from penstock.planner_service.stages.sample import LengthSample, in_flight
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.stages.layout import StageLayout
from penstock.types.plans import QoeModel, Stage
from tests.support.present import present
from tests.support.tables import write_trace

QOE = QoeModel(0.005, 1e-5, 1e-8, 0.0, 2e-7)
INSTANCES = 4
FAST = Moves(1e5, 1e12, 0.0)
MOVE = Moves(1e5, 1e12)


def replica(gap_s: float = 0.0, kv_tokens: int = 60_000) -> Replica:
    latency = StepLatencyModel((0.0, 1.0), (0.005, 0.00501), 1e-7, 0.0, gap_s)
    return Replica(ReplicaShape(1, 1), latency, kv_tokens, EngineLimits(64, 512, 16))


def workload(requests: int, rate: float, seed: int = 1) -> Workload:
    """Replies of like lengths; one prompt in ten is long."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests))
    inputs = np.where(rng.random(requests) < 0.1, rng.integers(3000, 5000, requests), rng.integers(20, 200, requests))
    return Workload(arrivals - arrivals[0], inputs, rng.integers(50, 250, requests))


def proposals(work: Workload, one: Replica, move: Moves = MOVE) -> list[StageLayout]:
    sample = in_flight(work, 200)
    return propose(work, sample, QOE, one, INSTANCES, work.longest_tokens + 1, move)


def test_what_is_proposed_can_be_served() -> None:
    """Layouts of several stages on all instances, each once; none without the KV or the bandwidth."""
    work, one = workload(400, 20.0), replica()
    layouts = proposals(work, one)
    assert layouts
    assert len(set(layouts)) == len(layouts)
    for layout in layouts:
        assert len(layout.stages) > 1
        assert layout.instances == INSTANCES
        assert layout.max_tokens > work.longest_tokens
    sample = LengthSample.of(np.array([10, 900, 950]), np.array([5, 5, 5]), np.array([9, 999, 999]))
    layout = StageLayout((Stage(0, 100, 3), Stage(100, 1000, 1)))
    enough = int(1850 / KV_SHARE) + 16
    assert fits(layout, work, sample, replica(kv_tokens=enough), MOVE)
    assert not fits(layout, work, sample, replica(kv_tokens=enough - 32), MOVE)
    crossing = float(((work.input_tokens < 100) & (work.input_tokens + work.output_tokens >= 100)).mean())
    moved = crossing * work.rate_per_s * 100 * 1e5  # bytes per second, through the one instance of the second stage
    assert moved > 0
    assert fits(layout, work, sample, replica(kv_tokens=enough), Moves(1e5, 2.1 * moved))
    assert not fits(layout, work, sample, replica(kv_tokens=enough), Moves(1e5, 1.9 * moved))


def test_instances_are_shared_out_by_work() -> None:
    work, one = workload(400, 20.0), replica()
    layout = StageLayout((Stage(0, 300, 9), Stage(300, 6000, 1)))
    short, long = stage_seconds(layout, work, one)
    shared = balanced(layout, work, one)
    assert shared.cuts == layout.cuts
    assert shared.instances == 10
    ratio = shared.stages[0].instances / shared.stages[1].instances
    assert ratio == pytest.approx(short / long, rel=0.5)
    whole = StageLayout.single(10, 6000)
    assert stage_seconds(whole, work, one).sum() == pytest.approx(short + long, rel=1e-6), "no work is lost"


def test_a_backlog_that_grows_is_not_sustained() -> None:
    """Of requests that take a second each, ten per second: all in time, all late from the start, later and later."""
    arrival = np.arange(1000) / 10.0
    assert is_stable(arrival, arrival + 1)
    assert is_stable(arrival, arrival + 9)
    assert not is_stable(arrival, 1.2 * arrival + 1)
    assert not is_stable(arrival, np.where(np.arange(1000) % 5, arrival + 1, 0)), "one class never ends"
    assert is_stable(np.zeros(3), np.zeros(3))


def test_a_rate_is_judged_by_as_many_requests_as_it_takes() -> None:
    """The same requests over and over, at the rate."""
    work = workload(300, 5.0)
    for rate, requests in ((1.0, 150), (50.0, 2500)):
        long = lasting(work, rate, requests)
        assert len(long) == requests
        assert long.rate_per_s == pytest.approx(rate, rel=0.1)
        count = min(requests, 300)
        assert set(long.input_tokens[:count]) <= set(work.input_tokens)
        assert (np.sort(long.input_tokens[:count]) == np.sort(work.input_tokens)[:count]).all() or count < 300
        assert (long.input_tokens[:count] != work.input_tokens[:count]).any(), "in another order"


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less precise sustained rates, in less time."""
    monkeypatch.setattr(stage_replay, "SUSTAINED_REQUESTS", (400, 800))


@pytest.mark.usefixtures("short_runs")
def test_the_sustained_rate_is_sustained_and_little_more_is_not() -> None:
    """Within its precision: a rate beyond the arithmetic of the instances is never called sustained."""
    work, one = workload(300, 5.0), replica()
    rate = Replayer(work, one, 2, FAST).sustained_per_s(LeastWork)
    mean_s = stage_seconds(StageLayout.single(2, 6000), work, one).sum() / len(work)
    assert 0.3 * 2 / mean_s < rate < 1.6 * 2 / mean_s


@pytest.mark.usefixtures("short_runs")
def test_the_verdict_is_what_the_replay_shows() -> None:
    """Where short requests pay for long ones in their batch, stages help; where they do not, one stage stays."""
    work, slow = workload(300, 14.0), replica(gap_s=5e-7)
    verdict = judge(work, slow, FAST, QOE, INSTANCES, proposals(work, slow))
    assert verdict.use_stages
    layout = present(verdict.layout)
    before, after = (
        figures_of(serve_on(Cluster(work, [slow] * INSTANCES, FAST), policy))
        for policy in (LeastWork, lambda c: Staged(c, layout, QOE))
    )
    p50, p95, tpot, rate = verdict.changes
    assert tpot == pytest.approx(after.tpot_s / before.tpot_s - 1)
    assert p50 == pytest.approx(after.ttft_p50_s / before.ttft_p50_s - 1)
    assert p95 == pytest.approx(after.ttft_p95_s / before.ttft_p95_s - 1)
    assert max(p50, p95, tpot, -rate) <= MARGIN
    assert min(p50, p95, tpot, -rate) <= -MIN_GAIN
    assert verdict.sentence.startswith(f"Use {len(layout.stages)} stages")


@pytest.mark.slow
@pytest.mark.usefixtures("short_runs")
def test_what_helps_now_is_not_chosen_where_it_would_have_done_harm_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout is for long prompts: on requests that are all short, most instances had nothing to do."""
    monkeypatch.setattr(stage_replay, "REPLAYED", 300)
    monkeypatch.setattr(stage_replay, "LEAST_BEFORE", 300)
    last, slow = workload(300, 14.0), replica(gap_s=5e-7)
    layouts = proposals(last, slow)
    short = Workload(np.arange(300) / 60.0, np.full(300, 100), np.full(300, 150))

    def together(before: Workload) -> Workload:
        arrivals = np.concatenate([before.arrival_s, before.arrival_s[-1] + 1 + last.arrival_s])
        inputs, outputs = (
            np.concatenate([getattr(one, name) for one in (before, last)]) for name in ("input_tokens", "output_tokens")
        )
        return Workload(arrivals, inputs, outputs)

    alone = judge(last, slow, FAST, QOE, INSTANCES, layouts)
    assert (alone.favoured, alone.before) == (True, None)
    again = judge(together(last), slow, FAST, QOE, INSTANCES, layouts)
    assert again.favoured
    assert again.before is not None
    harmed = judge(together(short), slow, FAST, QOE, INSTANCES, layouts)
    assert not harmed.use_stages
    assert max(present(harmed.before).losses) > MARGIN
    assert present(harmed.layout) == alone.layout
    assert "but on the requests before time to first token" in harmed.sentence
    monkeypatch.setattr(stage_replay, "LEAST_BEFORE", 301)
    assert judge(together(short), slow, FAST, QOE, INSTANCES, layouts).before is None


@pytest.mark.usefixtures("short_runs")
def test_no_gain_no_stages() -> None:
    even = Workload(np.arange(300) / 20.0, np.full(300, 100), np.full(300, 100))
    kept = judge(even, replica(), FAST, QOE, INSTANCES, [StageLayout((Stage(0, 150, 2), Stage(150, 300, 2)))])
    assert not kept.use_stages
    assert kept.sentence.startswith("Keep one stage: the best of 1 layouts")
    none = judge(even, replica(), FAST, QOE, INSTANCES, [])
    assert (none.use_stages, none.layout, none.changes.tpot_change) == (False, None, 0.0)
    assert "no layout" in none.sentence


@pytest.mark.usefixtures("short_runs")
def test_stages_that_do_not_help_are_not_chosen(tmp_path: Path) -> None:
    """The command says so in JSON and keeps one stage; without a replay nothing is published."""
    trace = write_trace(tmp_path / "trace.csv", ((i / 4, 100 + i % 7, 40 + i % 11) for i in range(200)))
    command = ["stages", "--instances", "3", "--trace", str(trace)]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert len(figures["stages"]) == 1
    assert figures["verdict"]["use_stages"] is False
    assert {"ttft_p50_change", "ttft_p95_change", "tpot_change", "sustained_rate_change"} < set(figures["verdict"])
    blind = CliRunner().invoke(app, [*command, "--apply", "small", "--no-replay"])
    assert blind.exit_code == 2
    assert json.loads(CliRunner().invoke(app, [*command, "--no-replay", "--json"]).stdout)["verdict"] is None
