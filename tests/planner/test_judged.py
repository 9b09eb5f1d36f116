"""Requests with SLOs in virtual time: what is judged, by which policy it was served, and what a fleet does with a decline."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.slo_baselines import BatchPolicy, Deployment, Disaggregated, PlainReplicas
from penstock.planner_service.simulator import EngineLimits, Replica, Workload
from penstock.planner_service.simulator.attainment_kernel import Slos, judge_token, new_judgement
from penstock.planner_service.simulator.judged import Promises, SloReplicas
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.slo.attainment import AttainmentTracker

LATENCY = StepLatencyModel.linear(0.01, 1e-4, 1e-7)
REPLICA = Replica(ReplicaShape(1, 1), LATENCY, 20_000, EngineLimits(64, 512))


def burst(count: int, gap_s: float, prompt: int = 400, output: int = 20) -> Workload:
    return Workload(np.arange(count, dtype=np.float64) * gap_s, np.full(count, prompt), np.full(count, output))


def promises(count: int, ttft_s: float, tpot_s: float) -> Promises:
    return Promises.of_one_phase(np.full(count, ttft_s), np.full(count, tpot_s))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(0.0, 0.2), min_size=1, max_size=40),
    st.sampled_from([0.1, 1.0, math.inf]),
    st.sampled_from([0.05, 0.1]),
    st.sampled_from([0.05, 0.2]),
    st.integers(1, 40),
)
def test_tokens_are_judged_as_the_attainment_tracker_does(
    gaps_s: list[float], due_s: float, tpot_s: float, later_s: float, later_from: int
) -> None:
    """One and two phases, short replies and long ones: the compiled judgement is the tracker's."""
    at_s = np.cumsum(gaps_s)
    slos = Slos(np.array([due_s]), np.array([tpot_s]), np.array([later_s]), np.array([later_from]))
    judgement, tracker = new_judgement(1), AttainmentTracker(None if math.isinf(due_s) else due_s)
    for k, time_s in enumerate(at_s):
        judge_token(0, time_s, k == len(at_s) - 1, slos, judgement)
        tracker.token(float(time_s), tpot_s if k < later_from else later_s)
    result = tracker.result()
    assert judgement.misses[0] == (result.first_token_late_s > 0) + result.late_windows


@pytest.mark.slow
def test_every_deployment_attains_all_of_a_light_load() -> None:
    """Five requests, far apart: no policy misses one, and all of them finish with the same first token times."""
    work, slos = burst(5, 2.0), promises(5, 0.2, 0.05)
    deployments: list[Deployment] = [
        SloReplicas(REPLICA),
        SloReplicas(REPLICA, 2, hops=1),
        *(PlainReplicas(REPLICA, policy, drop_late=drop) for policy in BatchPolicy for drop in (False, True)),
        Disaggregated(REPLICA, 1, 1, 1e-6),
    ]
    for deployment in deployments:
        judged = deployment.serve(work, slos)
        assert judged.attained.all(), deployment
        assert (judged.finish_s > judged.first_s).all(), deployment
        assert judged.first_s - work.arrival_s == pytest.approx(np.full(5, LATENCY.base_s(400) + 400e-7)), deployment


def test_a_burst_costs_the_slo_policy_some_requests_and_the_others_nearly_all() -> None:
    """Forty prompts at once: first come first served makes most late; admission keeps what it can and serves the rest too."""
    work, slos = burst(40, 0.001), promises(40, 0.5, 0.05)
    slo = SloReplicas(REPLICA).serve(work, slos)
    plain = PlainReplicas(REPLICA, BatchPolicy.DECODE_FIRST).serve(work, slos)
    dropping = PlainReplicas(REPLICA, BatchPolicy.DECODE_FIRST, drop_late=True).serve(work, slos)
    assert slo.attained.sum() > plain.attained.sum()
    assert (slo.attained == slo.admitted).all()
    assert (slo.finish_s > 0).all(), "a best-effort request did not end"
    assert (plain.finish_s > 0).all()
    assert 0 < (dropping.finish_s == 0).sum() < 40


def test_a_declined_request_tries_the_next_replica_and_may_be_admitted_there() -> None:
    """Two replicas, every other request long: without a hop the busier replica declines what the other admits."""
    count = 40
    work = Workload(
        np.arange(count, dtype=np.float64) * 0.004, np.where(np.arange(count) % 2, 20, 500), np.full(count, 10)
    )
    slos = promises(count, 0.4, 0.02)
    fleet = SloReplicas(REPLICA, 2)
    without, hopping = fleet.serve(work, slos), replace(fleet, hops=1).serve(work, slos)
    assert hopping.attained.sum() > without.attained.sum()
    assert (hopping.attained == hopping.admitted).all()


def test_a_run_is_abandoned_once_too_many_have_missed() -> None:
    """The outcome that is asked for is known: more misses than allowed."""
    work, slos = burst(60, 0.001), promises(60, 0.05, 0.05)
    deployment = PlainReplicas(REPLICA, BatchPolicy.DECODE_FIRST)
    assert not (deployment.serve(work, slos, misses_allowed=3).finish_s > 0).all()
    assert (deployment.serve(work, slos, misses_allowed=60).finish_s > 0).all()


def test_a_request_that_is_longer_than_the_kv_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="replica"):
        SloReplicas(replace(REPLICA, kv_tokens=100)).serve(burst(3, 0.1), promises(3, 1.0, 0.1))
