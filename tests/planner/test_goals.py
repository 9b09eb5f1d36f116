"""Thresholds and deployment together: worked examples, the optimum against brute force, what cannot be met."""

import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks.brute_force import LIMITS, brute_force, exhaustive_latency, instance, kinds, wanted_quality
from penstock.planner_service.deployment.saturation import Sustain
from penstock.planner_service.deployment.search import LatencyTable
from penstock.planner_service.routing import grid
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.goals import cheapest, least_latency, most_quality
from penstock.planner_service.routing.quality import (
    SKIPPED,
    JudgedSample,
    all_qualities,
    route,
)
from penstock.planner_service.routing.solution import Proof, Unreachable
from penstock.planner_service.simulator import Dispatch, Replica, Workload
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from tests.support.present import present


@pytest.mark.parametrize("seeds", [range(16), pytest.param(range(16, 200), marks=pytest.mark.slow)], ids=["16", "200"])
def test_the_optimum_is_brute_forces(seeds: range) -> None:
    """Seeded instances of two and three tiers."""
    for seed in seeds:
        deployer, sample = instance(seed, tiers=2 + seed % 2, count=5 + seed % 4, gpus=4)
        wanted = wanted_quality(sample)
        try:
            found = least_latency(deployer, wanted)
        except Unreachable:
            assert brute_force(deployer, sample, wanted) == np.inf
            continue
        assert found.proof is Proof.ENUMERATED
        assert found.deployment.latency_s == pytest.approx(brute_force(deployer, sample, wanted)), seed
        assert found.quality >= wanted - 1e-9
        assert found.quality == pytest.approx(route(sample, found.thresholds).quality)
        assert sum(found.deployment.gpus) <= deployer.gpus


def test_a_search_of_large_grids_loses_little_and_its_gap_is_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With so few tries that not all are made: near the optimum, mostly on it, and never further than the gap says."""
    same = proved = 0
    monkeypatch.setattr(grid, "MOST_EVALUATIONS", 12)
    for seed in range(24):
        deployer, sample = instance(seed, count=24)
        wanted = float(sample.worst + 0.5 * (sample.best - sample.worst))
        monkeypatch.setattr(grid, "ENUMERATE_UP_TO", 10**6)
        exact = least_latency(deployer, wanted).deployment.latency_s
        monkeypatch.setattr(grid, "ENUMERATE_UP_TO", 0)
        again, _ = instance(seed, count=24)
        found = least_latency(again, wanted)
        latency = found.deployment.latency_s
        assert found.proof in (Proof.BOUNDED, Proof.SEARCHED)
        assert latency * (1 - present(found.gap)) - 1e-9 <= exact <= latency + 1e-9
        assert latency <= exact * 1.05
        same += latency == pytest.approx(exact)
        proved += found.proof is Proof.BOUNDED
    assert same >= 22
    assert 0 < proved < 24


def long_answers_of_few() -> tuple[JudgedSample, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """1,500 prompts: 30 that score under 10 need 2,000 tokens of the larger tier, the others, at 20 to 90, 80 to 160."""
    rng = np.random.default_rng(1)
    count, hard = 1500, 30
    scores = np.column_stack([rng.uniform(20, 90, count), np.full(count, 90.0)])
    scores[:hard, 0] = rng.uniform(0, 10, hard)
    outputs = rng.integers(80, 161, (count, 2))
    outputs[:hard, 1] = 2000
    order = rng.permutation(count)
    sample = JudgedSample(("small", "large"), rng.integers(50, 400, count), outputs, np.round(scores, 3))
    return sample.subset(order), np.cumsum(rng.exponential(1.0, count))


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "gpus", "gain"), [(60.0, 12, 1.15), (80.0, 8, 1.9)])
def test_more_short_requests_may_make_a_tier_faster(rate: float, gpus: int, gain: float) -> None:
    """The larger tier is best asked by two in five: less than by all, and more than quality needs. Its p95 is over its
    own requests, so with fewer the 30 long ones are five in a hundred of them. A bound that takes more traffic to be
    slower misses that, and so do small steps from where it ends."""
    sample, arrivals = long_answers_of_few()
    slow = [
        Replica(ReplicaShape(tp, 1), StepLatencyModel.linear(0.02 / k, 2e-4 / k, 1e-8), 200_000)
        for tp, k in ((1, 1.0), (2, 1.8), (4, 3.2))
    ]
    fast = dataclasses.replace(slow[0], latency=StepLatencyModel.linear(0.003, 1e-5, 1e-9))
    deployer = Deployer(sample, arrivals / rate, [[fast], slow], gpus)
    plan = least_latency(deployer, 60.0)
    assert route(sample, plan.thresholds).share_processed()[1] == pytest.approx(0.41, abs=0.02)
    levels = sample.levels(0)
    everywhere = [
        deployer.latency_s([float(h)]) for h in levels[:: len(levels) // 40] if route(sample, [h]).quality >= 60
    ]
    assert plan.deployment.latency_s <= min(everywhere) * 1.001
    assert plan.deployment.latency_s < deployer.latency_s([SKIPPED]) / gain
    assert plan.proof is Proof.SEARCHED
    assert present(plan.gap) > 0


def test_latencies_do_not_depend_on_what_was_asked_before() -> None:
    """l(f) asked upwards, downwards and alone: the same to the last digit, and least_gpus_within is its inverse."""
    rng = np.random.default_rng(6)
    for _ in range(10):
        work = Workload(np.cumsum(rng.exponential(0.02, 50)), rng.integers(5, 90, 50), rng.integers(2, 60, 50))

        def table(of: Workload = work) -> LatencyTable:
            return LatencyTable(of, kinds(1.0), Dispatch.CAPACITY, 95.0)

        up, down = table(), table()
        rising = [up.latency_s(f) for f in range(9)]
        assert [down.latency_s(f) for f in reversed(range(9))] == rising[::-1]
        assert [table().latency_s(f) for f in range(9)] == rising
        assert [down.best(f) for f in range(9)] == [up.best(f) for f in range(9)] == [table().best(f) for f in range(9)]
        better = [next((f for f in range(g + 1, 9) if rising[f] < rising[g]), None) for g in range(1, 9)]
        assert [table().next_better(g, 8) for g in range(1, 9)] == better
        fewer = [next((f for f in range(g - 1, 0, -1) if rising[f] > rising[g]), None) for g in range(1, 9)]
        assert [table().next_fewer(g) for g in range(1, 9)] == fewer
        for limit in (*rising[1:], 0.9 * rising[3], 0.5 * rising[8]):
            within = next((f for f, s in enumerate(rising) if s <= limit), None)
            assert table().least_gpus_within(limit, 8) == within
            assert up.least_gpus_within(limit, 8) == within


def test_fewer_gpus_than_the_least_sustain_nothing() -> None:
    """No multiset of replicas on fewer GPUs than least_sustaining_gpus sustains the rate, by either dispatch."""
    replicas = [*kinds(1.0), Replica(ReplicaShape(4, 1), StepLatencyModel.linear(0.008, 4e-5, 1e-6), 8192, LIMITS)]
    bounded = 0
    for seed, dispatch in itertools.product(range(10), Dispatch):
        rng = np.random.default_rng(seed)
        work = Workload(np.cumsum(rng.exponential(0.05, 80)), rng.integers(5, 90, 80), rng.integers(2, 60, 80))
        sustain = Sustain(work.rate_per_s, 0.75, {kind: float(rng.uniform(0.3, 1.0)) for kind in replicas})
        table = LatencyTable(work, replicas, dispatch, 95.0, sustain)
        free = LatencyTable(work, replicas, dispatch, 95.0)
        assert free.least_sustaining_gpus == free.least_gpus == 1
        bounded += table.least_sustaining_gpus > 1
        assert all(table.best(f) is None for f in range(table.least_sustaining_gpus))
        for counts in itertools.product(range(9), range(5), range(3)):
            parts = tuple((k, n) for k, n in enumerate(counts) if n)
            if parts and sum(n * replicas[k].shape.gpus for k, n in parts) < table.least_sustaining_gpus:
                assert not table._sustains(parts)
    assert bounded > 5


@pytest.mark.slow
def test_the_cheapest_cluster_is_brute_forces() -> None:
    """200 seeded instances: the fewest GPUs of all thresholds, splits and multisets of replicas that meet both targets."""
    for seed in range(200):
        deployer, sample = instance(seed, tiers=2 + seed % 2, count=5 + seed % 4, gpus=4)
        wanted, limit = wanted_quality(sample), float(np.random.default_rng(seed).uniform(0.3, 3.0))
        exact = next((f for f in range(1, 5) if brute_force(gpus_of(deployer, f), sample, wanted) <= limit), None)
        if exact is None:
            with pytest.raises(Unreachable):
                cheapest(deployer, wanted, limit)
            continue
        plan = cheapest(deployer, wanted, limit)
        assert sum(plan.deployment.gpus) == exact, seed
        assert plan.deployment.latency_s <= limit
        assert plan.quality >= wanted - 1e-9
        assert plan.proof is Proof.ENUMERATED


def gpus_of(deployer: Deployer, gpus: int) -> Deployer:
    return Deployer(deployer.sample, deployer._traffic.arrival_s, deployer.kinds, gpus)


def test_the_twin_finds_the_most_quality_within_a_latency() -> None:
    for seed in range(10):
        deployer, sample = instance(seed, count=10)
        levels, qualities = all_qualities(sample)
        by_point = {
            p: deployer.latency_s([float(levels[t][i]) for t, i in enumerate(p)]) for p in np.ndindex(qualities.shape)
        }
        budget = float(np.median([s for s in by_point.values() if s < np.inf]))
        best = max(qualities[p] for p, s in by_point.items() if s <= budget)
        found = most_quality(deployer, budget)
        assert found.deployment.latency_s <= budget
        assert found.quality == pytest.approx(best, rel=0.02)


def test_the_least_latency_that_is_said_is_brute_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no routing is fast enough, the least latency named is that of all routings, and asking for it succeeds."""
    same = 0
    for seed in range(12):
        tiers = 2 + seed % 2
        small, sample = instance(seed, tiers=tiers, count=7, gpus=4)
        least = brute_force(small, sample, 0.0)
        monkeypatch.setattr(grid, "ENUMERATE_UP_TO", 10**6 if seed % 3 == 0 else 0)
        deployer, _ = instance(seed, tiers=tiers, count=7, gpus=4)
        with pytest.raises(Unreachable) as caught:
            most_quality(deployer, least * 0.9)
        assert least - 1e-9 <= caught.value.best <= least * 1.02, seed
        same += caught.value.best == pytest.approx(least)
        said = float(str(caught.value).rpartition("the least is ")[2].removesuffix(" s"))
        assert caught.value.best <= said <= caught.value.best * 1.01
        assert most_quality(deployer, said).deployment.latency_s <= said
    assert same >= 11


def test_every_tier_but_the_last_needs_a_threshold() -> None:
    with pytest.raises(InvalidRequest, match="thresholds"):
        route(instance(0)[1], (50.0,) * 5)


def test_what_cannot_be_met_says_what_can() -> None:
    deployer, sample = instance(3)
    with pytest.raises(Unreachable, match="the best is") as caught:
        least_latency(deployer, 100.0)
    assert caught.value.best == pytest.approx(all_qualities(sample)[1].max())
    with pytest.raises(Unreachable, match="the least is"):
        most_quality(deployer, 1e-6)
    tight, _ = instance(3, gpus=6)
    tight.gpus = 0
    with pytest.raises(Unreachable, match="fits 0 GPUs"):
        least_latency(tight, 0.0)


def test_the_search_loses_next_to_nothing_to_the_best_of_all_mixes() -> None:
    """Against every multiset of three kinds of replica on up to eight GPUs: those of all three kinds are not searched."""
    times = list[float]()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        count = 40
        work = Workload(np.cumsum(rng.exponential(0.03, count)), rng.integers(5, 90, count), rng.integers(2, 60, count))
        three = [*kinds(1.0), Replica(ReplicaShape(4, 1), StepLatencyModel.linear(0.008, 4e-5, 1e-6), 8192, LIMITS)]
        table = LatencyTable(work, three, Dispatch.CAPACITY, 95.0)
        for gpus in (3, 7, 8):
            best, exact = present(table.best(gpus)), exhaustive_latency(work, three, gpus, Dispatch.CAPACITY, 95.0)
            times.append(best.latency_s / present(exact).latency_s)
    assert max(times) < 1.02
    assert sum(time > 1 + 1e-9 for time in times) <= 2
