"""Tiers simulated with the routers' placement: against turns, with unlike replicas, and where it is refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.planner_service.simulator import Dispatch, EngineLimits, Replica, Workload, serve
from penstock.planner_service.simulator.placed import serve_placed
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from tests.conftest import ROOT
from tests.support.cli import penstock as run
from tests.support.plain_plans import plain_options
from tests.support.questions import asked


def replica() -> Replica:
    return Replica(ReplicaShape(1, 1), StepLatencyModel.linear(0.005, 1e-4, 1e-8), 30_000, EngineLimits(16, 256, 16))


def workload(seed: int, count: int = 150) -> Workload:
    """Random lengths, bursts, and two priorities; long enough together that some are preempted."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(0.05, count) * rng.choice([0.1, 3.0], count))
    lengths = rng.integers(1, 900, count), rng.integers(1, 1500, count)
    return Workload(arrival_s, *lengths, rng.integers(0, 2, count))


@pytest.mark.parametrize("cached_share", [0.0, 0.7])
@pytest.mark.parametrize("seed", range(8))
def test_one_replica_serves_as_in_turns(seed: int, cached_share: float) -> None:
    """Where there is no choice, the same steps at the same times; cached prompt tokens are computed by neither."""
    work = workload(seed)
    work = dataclasses.replace(work, cached_tokens=(cached_share * work.input_tokens).astype(np.int64))
    turns, placed = serve(work, [replica()]), serve_placed(work, [replica()])
    np.testing.assert_allclose(placed.first_s, turns.first_s, rtol=0, atol=1e-9)
    np.testing.assert_allclose(placed.finish_s, turns.finish_s, rtol=0, atol=1e-9)
    assert (placed.steps, placed.preemptions) == (turns.steps, turns.preemptions)
    assert placed.busy_share == pytest.approx(turns.busy_share)


def test_long_prompts_do_not_queue_behind_each_other() -> None:
    """Every second prompt is long: in turns, one of two replicas gets all of them."""
    tokens = np.array([4000, 20] * 60)
    work = Workload(np.arange(120, dtype=np.float64) * 0.2, tokens, np.full(120, 10))
    turns, placed = (f(work, [replica()] * 2) for f in (serve, serve_placed))
    assert len(set(turns.replica[::2])) == 1
    assert len(set(placed.replica[::2])) == 2
    assert np.percentile(placed.finish_s - work.arrival_s, 95) < np.percentile(turns.finish_s - work.arrival_s, 95)


def test_unlike_replicas_keep_their_own_pace_and_room() -> None:
    """The slower one falls behind, and gets fewer requests."""
    fast = replica()
    knots = tuple(4 * each_s for each_s in fast.latency.knot_s)
    latency = dataclasses.replace(fast.latency, knot_s=knots)
    slow = dataclasses.replace(fast, latency=latency)
    work = Workload(np.arange(200, dtype=np.float64) * 0.02, np.full(200, 300), np.full(200, 40))
    served = serve_placed(work, [fast, slow])
    assert (served.finish_s > served.first_s).all()
    counts = np.bincount(served.replica, minlength=2)
    assert counts[0] > 1.2 * counts[1] > 0


def test_what_cannot_be_simulated_is_refused() -> None:
    work = Workload(np.zeros(1), np.array([5]), np.array([5]))
    with pytest.raises(InvalidRequest, match="at least one"):
        serve_placed(work, [])
    staged: Replica = dataclasses.replace(replica(), shape=ReplicaShape(1, 2))
    with pytest.raises(InvalidRequest, match="without pipeline stages"):
        serve_placed(work, [staged])
    with pytest.raises(InvalidRequest, match="KV"):
        serve_placed(Workload(np.zeros(1), np.array([10**7]), np.array([5])), [replica()])
    assert len(serve_placed(Workload(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)), []).first_s) == 0
    with pytest.raises(InvalidRequest, match="pending-work is for simulations"):
        plain_options(min_quality=50, dispatch=Dispatch.PENDING_WORK).check(2)


@pytest.mark.slow
def test_a_plan_is_replayed_as_routers_place(tmp_path: Path) -> None:
    """`simulate --dispatch pending-work`; without it, as planned."""
    out, examples = tmp_path / "plan.json", ROOT / "examples"
    site = ("--cluster", examples / "cluster-1x8-h100.yaml", "--models", examples / "qwen2.5-cascade.yaml")
    data = ("--trace", examples / "trace.csv", "--quality", examples / "judged.csv")
    short = asked(requests=200, runs=0)
    planned = run("plan", *site, *data, "--min-quality", 75, "--rate", 20, *short, "--no-plot", "--out", out)
    assert planned.returncode == 0, planned.output
    trace = ("--trace", examples / "trace.csv", "--requests", 300, "--rate", 20, "--json")
    results = {}
    for name in (None, "capacity", "pending-work"):
        how = () if name is None else ("--dispatch", name)
        replayed = run("simulate", "--plan", out, *trace, *how)
        assert replayed.returncode == 0, replayed.output
        results[name] = json.loads(replayed.stdout)
    assert results[None] == results["capacity"]
    assert results["pending-work"]["end_to_end_s"] != results["capacity"]["end_to_end_s"]
    refused = run("simulate", "--plan", out, *trace, "--dispatch", "random")
    assert refused.returncode == 2
    assert all(part in refused.output for part in ("--dispatch", "'capacity'", "'round-robin'", "'pending-work'"))
    refused = run("plan", *site, *data, "--min-quality", 75, *asked(dispatch="pending-work"))
    assert refused.returncode == 2
    assert "dispatch: plans are made with capacity or round-robin" in refused.output
