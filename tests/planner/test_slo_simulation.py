"""SLOs of a cascade in virtual time: one deadline for all tiers, and how many GPUs a trace needs to attain them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.slo_classes import WorkloadClass, check_classes, draw_classes
from penstock.planner_service.replay.slo_simulation import fewest_gpus, simulate_slos
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import EngineLimits, Replica, Workload
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ClusterSpec, GpuSpec, ModelSpec, ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from tests.support.present import present

CHAT = WorkloadClass("chat", 1.0, 0.05, 1.0)
LATENCY = StepLatencyModel.linear(0.01, 1e-4, 1e-7)
REPLICA = Replica(ReplicaShape(1, 1), LATENCY, 50_000, EngineLimits(64, 1024))
MODEL = ModelSpec("m", 4, 64, 4, 4, 16, 1e6, 1e6, 2.0, 1e3)
GPU = GpuSpec("gpu", 80e9, 2e12, 3e14, 3e11)


def site(gpus: int = 8, judge_s: float = 0.1) -> Site:
    measured = ((REPLICA,), (REPLICA,))
    return Site(ClusterSpec(GPU, 1, gpus, 1e9), ("small", "large"), (MODEL, MODEL), judge_s=judge_s, measured=measured)


def trace(requests: int, per_s: float, seed: int = 1) -> Workload:
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / per_s, requests))
    return Workload(arrival_s, rng.integers(50, 800, requests), rng.integers(5, 60, requests))


def demand(work: Workload, low_scores: float) -> Demand:
    """A share of the requests is refused by the first tier."""
    n = len(work)
    scores = np.stack([np.where(np.arange(n) % 100 < 100 * low_scores, 10.0, 90.0), np.full(n, 95.0)], axis=1)
    judged = JudgedSample(
        ("small", "large"), work.input_tokens, np.repeat(work.output_tokens[:, None], 2, axis=1), scores
    )
    return Demand(judged, judged, work.arrival_s)


def strategies(count: int) -> list[Strategy]:
    return [Strategy(((REPLICA, count),), 0.0)] * 2


def test_the_deadline_of_a_request_is_one_for_all_tiers() -> None:
    """What escalates has the first tier's time and the judge's less for its first token: with a slow judge none attains."""
    work = trace(200, 1.0)
    loose = WorkloadClass("chat", 2.0, 0.05, 1.0)
    (quick,) = simulate_slos(site(judge_s=0.01), demand(work, 0.5), (50.0,), strategies(4), [loose], 1)
    (slow,) = simulate_slos(site(judge_s=1.99), demand(work, 0.5), (50.0,), strategies(4), [loose], 1)
    assert present(quick.attainment) > 0.95
    assert present(slow.attainment) < 0.05
    none_escalates = simulate_slos(site(judge_s=0.01), demand(work, 0.0), (50.0,), strategies(4), [loose], 1)
    assert present(none_escalates[0].attainment) >= present(quick.attainment)


def test_more_replicas_attain_more_and_classes_share_the_requests() -> None:
    """A load that one replica of each tier cannot hold; best effort is neither admitted nor attained."""
    work = trace(600, 25.0)
    classes = [replace(CHAT, share=0.6), WorkloadClass("batch", math.inf, math.inf, 0.3)]
    few = simulate_slos(site(), demand(work, 0.3), (50.0,), strategies(1), classes, 1)
    many = simulate_slos(site(), demand(work, 0.3), (50.0,), strategies(4), classes, 1)
    assert present(few[0].attainment) < 0.9 < present(many[0].attainment)
    assert [one.attainment for one in (few[1], many[1])] == [None, None]
    assert 300 < many[0].requests < 420
    assert sum(one.requests for one in many) < 600  # the rest has no class


@pytest.mark.slow
def test_the_fewest_gpus_are_the_fewest() -> None:
    """One GPU less misses the target; the capacity is no less than the trace's rate; a slower trace needs fewer."""
    work = trace(1500, 60.0)
    result = fewest_gpus(site(), 1, work, [CHAT], 0.9, 1)
    assert result.attainment >= 0.9
    assert 1 < result.gpus < 8
    with pytest.raises(Unreachable, match=r"not 90\.0%"):
        fewest_gpus(site(result.gpus - 1), 1, work, [CHAT], 0.9, 1)
    assert result.capacity_per_s >= 0.99 * work.rate_per_s
    slower = Workload(work.arrival_s * 4, work.input_tokens, work.output_tokens)
    assert fewest_gpus(site(), 1, slower, [CHAT], 0.9, 1).gpus < result.gpus


def test_only_shapes_of_one_batch_keep_slos() -> None:
    """A replica with attention groups or pipeline stages has several batches; capacity is of other shapes."""
    work = trace(30, 1.0)
    for shape in (ReplicaShape(2, 1, attn_dp=2), ReplicaShape(1, 2)):
        several = replace(REPLICA, shape=shape)
        with pytest.raises(InvalidRequest, match=r"replica\.shape: SLOs are simulated without"):
            simulate_slos(site(), demand(work, 0.0), (50.0,), [Strategy(((several, 1),), 0.0)] * 2, [CHAT], 1)
        both = replace(site(), measured=((REPLICA, several),) * 2)
        assert fewest_gpus(both, 1, work, [CHAT], 0.1, 1).replicas[0] == REPLICA.shape.times(1)
        with pytest.raises(
            Unreachable, match="no replica of large without pipeline stages and data-parallel attention"
        ):
            fewest_gpus(replace(both, measured=((several,),) * 2), 1, work, [CHAT], 0.1, 1)


def test_bad_classes_are_refused_by_name() -> None:
    work = trace(30, 1.0)
    bad = [
        ([], "slo"),
        ([CHAT, replace(CHAT, share=0.1)], "slo"),
        ([CHAT, replace(CHAT, name="b", share=0.5)], "slo"),
        ([replace(CHAT, ttft_s=-1.0)], r"slo\[0\]"),
        ([replace(CHAT, ttft_s=math.inf)], r"slo\[0\]\.tpot_s"),
        ([replace(CHAT, share=0.0)], r"slo\[0\]\.share"),
    ]
    for classes, field in bad:
        with pytest.raises(InvalidRequest, match=field):
            check_classes(classes)
    with pytest.raises(InvalidRequest, match="attainment"):
        fewest_gpus(site(), 1, work, [CHAT], 1.5, 1)
    with pytest.raises(InvalidRequest, match="at least one class"):
        fewest_gpus(site(), 1, work, [WorkloadClass("batch", math.inf, math.inf, 1.0)], 0.9, 1)


def test_classes_are_drawn_by_their_shares() -> None:
    classes = [replace(CHAT, share=0.2), WorkloadClass("batch", math.inf, math.inf, 0.5)]
    drawn = draw_classes(classes, 20_000, 3)
    assert np.bincount(drawn) / 20_000 == pytest.approx([0.2, 0.5, 0.3], abs=0.02)
    whole = draw_classes([replace(CHAT, share=0.5), replace(CHAT, name="b", share=0.5)], 5_000, 3)
    assert set(whole.tolist()) == {0, 1}
