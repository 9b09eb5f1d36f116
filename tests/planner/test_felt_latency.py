"""Plans for the latencies that users feel: what each means, the search against brute force, and every goal."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from benchmarks.brute_force import instance, wanted_quality
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.files.hardware import gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.end_to_end import EndToEnd
from penstock.planner_service.routing.goals import least_latency
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.routing.solution import Proof, Unreachable
from penstock.planner_service.simulator import Dispatch, Replica, serve
from penstock.services.domain.hardware import ClusterSpec
from penstock.types.planning import Objective
from tests.support.present import present

FELT = (Objective.END_TO_END, Objective.FIRST_TOKEN, Objective.PACE)
JUDGE_S = 0.03


def problem(seed: int, objective: Objective, percentile: float) -> tuple[Deployer, Demand, Site]:
    """A small instance of `benchmarks.brute_force` with this objective."""
    plain, sample = instance(seed, tiers=2 + seed % 2, count=5 + seed % 4, gpus=4)
    arrivals = plain._traffic.arrival_s
    deployer = Deployer(sample, arrivals, plain.kinds, plain.gpus, objective=objective, percentile=percentile)
    model = model_of_catalogue("llama-2-7b")
    cluster = ClusterSpec(gpu_of_catalogue("a100-80gb"), 1, 4, 25e9)
    site = Site(cluster, sample.tiers, (model,) * len(sample.tiers), judge_s=JUDGE_S)
    return deployer, Demand(sample, sample, arrivals), site


def multisets(kinds: Sequence[Replica], gpus: int) -> Iterator[Strategy]:
    """Every strategy on at most so many GPUs, nothing included."""
    for counts in itertools.product(range(gpus + 1), repeat=len(kinds)):
        if sum(n * kind.shape.gpus for n, kind in zip(counts, kinds, strict=True)) <= gpus:
            yield Strategy(tuple((kind, n) for n, kind in zip(counts, kinds, strict=True) if n), 0.0)


def brute_force(deployer: Deployer, demand: Demand, site: Site, min_quality: float) -> float:
    """The least latency over all thresholds and all replicas of each tier, every cascade simulated whole."""
    sample, best = demand.judged, np.inf
    for thresholds in itertools.product(*(sample.levels(tier) for tier in range(len(sample.tiers) - 1))):
        routed = route(sample, thresholds)
        if routed.quality < min_quality - 1e-9:
            continue
        every = [
            list(multisets(kinds, deployer.gpus)) if row.any() else [Strategy((), 0.0)]
            for row, kinds in zip(routed.processed, deployer.kinds, strict=True)
        ]
        for strategies in itertools.product(*every):
            enough = all(s.used or not row.any() for s, row in zip(strategies, routed.processed, strict=True))
            if enough and sum(s.gpus for s in strategies) <= deployer.gpus:
                run = run_cascade(site, demand, thresholds, strategies, Dispatch.CAPACITY)
                best = min(best, run.latency_s(deployer.objective, deployer.percentile))
    return best


def found(deployer: Deployer, demand: Demand, site: Site, min_quality: float) -> tuple[float, float | None]:
    """(latency, gap) of the search."""

    def felt_s(thresholds: Sequence[float], strategies: Sequence[Strategy]) -> float:
        run = run_cascade(site, demand, thresholds, strategies, Dispatch.CAPACITY)
        return run.latency_s(deployer.objective, deployer.percentile)

    start = least_latency(deployer, min_quality).thresholds
    solution = EndToEnd(deployer, demand.judged, JUDGE_S, felt_s).least_latency(min_quality, start)
    assert solution.proof is Proof.SEARCHED
    assert solution.quality >= min_quality - 1e-9
    return felt_s(solution.thresholds, solution.deployment.strategies), solution.gap


@pytest.mark.slow
@pytest.mark.parametrize(
    ("percentile", "seeds"),
    [(95.0, 4), *(pytest.param(percentile, 12, marks=pytest.mark.slow) for percentile in (95.0, 99.0))],
)
@pytest.mark.parametrize("objective", FELT)
def test_the_search_is_near_brute_force_and_its_gap_is_honest(
    objective: Objective, percentile: float, seeds: int
) -> None:
    """Seeded instances for each latency: nothing below brute force is claimed, and little above it is lost."""
    same = instances = 0
    for seed in range(seeds):
        deployer, demand, site = problem(seed, objective, percentile)
        wanted = wanted_quality(demand.judged)
        try:
            latency_s, gap = found(deployer, demand, site, wanted)
        except Unreachable:
            assert brute_force(deployer, demand, site, wanted) == np.inf
            continue
        least_s = brute_force(deployer, demand, site, wanted)
        assert least_s - 1e-12 <= latency_s <= 1.01 * least_s, seed
        assert latency_s * (1 - present(gap)) <= least_s + 1e-12, seed
        same, instances = same + (latency_s == pytest.approx(least_s)), instances + 1
    assert same >= 0.9 * instances > 0


@pytest.mark.parametrize("percentile", [50.0, 95.0])
@pytest.mark.parametrize("objective", [Objective.FIRST_TOKEN, Objective.PACE])
def test_replicas_are_chosen_by_what_is_measured(objective: Objective, percentile: float) -> None:
    """A tier's table has the percentile that the simulation has, and no replicas that were tried have less."""
    for seed in range(6):
        deployer, demand, _ = problem(seed, objective, percentile)
        thresholds = (50.0,) * (len(demand.judged.tiers) - 1)
        deployment = deployer.deploy(thresholds)
        if deployment is None:
            continue
        last, strategy = len(demand.judged.tiers) - 1, deployment.strategies[-1]
        chosen = route(demand.judged, thresholds).processed[last]
        if not chosen.any():
            continue
        work = deployer.workload(last, chosen)
        values = {}
        for one in multisets(deployer.kinds[last], strategy.gpus):
            if one.used:
                served = serve(work, [replica for replica, count in one.replicas for _ in range(count)])
                first_s, written_s = served.first_s - work.arrival_s, served.finish_s - served.first_s
                paces_s = (written_s / np.maximum(work.output_tokens - 1, 1))[work.output_tokens > 1]
                felt_s = first_s if objective is Objective.FIRST_TOKEN else paces_s
                values[str(one)] = np.percentile(felt_s, percentile) if len(felt_s) else 0.0
        assert values[str(strategy)] == pytest.approx(strategy.latency_s)
        assert strategy.latency_s <= min(values.values()) + 1e-12


def two_requests() -> tuple[Site, Demand, tuple[Strategy, Strategy]]:
    """Requests so far apart that neither waits; the first tier's answer to one stands, the other goes on to the last tier."""
    deployer, _, site = problem(0, Objective.END_TO_END, 95.0)
    sample = JudgedSample(
        ("small", "large"),
        np.array([100, 100]),
        np.array([[11, 31], [21, 41]]),
        np.array([[90.0, 95.0], [10.0, 95.0]]),
    )
    site = dataclasses.replace(site, tiers=("small", "large"), models=site.models[:2])
    strategies = tuple(Strategy(((kinds[0], 1),), 0.0) for kinds in deployer.kinds[:2])
    return site, Demand(sample, sample, np.array([0.0, 100.0])), (strategies[0], strategies[1])


def test_a_held_answer_is_seen_when_it_is_accepted_and_the_last_tier_from_its_first_token_on() -> None:
    site, demand, strategies = two_requests()
    run = run_cascade(site, demand, (50.0,), strategies, Dispatch.CAPACITY)
    held_s, streamed_s = run.felt_s(Objective.FIRST_TOKEN)
    first, last = run.reports
    assert held_s == pytest.approx(run.total_s[0])
    assert held_s == pytest.approx(run.latencies_s[0][0] + JUDGE_S)
    assert streamed_s == pytest.approx(run.latencies_s[0][1] + JUDGE_S + last.ttft_s.mean)
    assert streamed_s < run.total_s[1]
    paces = run.felt_s(Objective.PACE)
    assert paces[1] == pytest.approx(last.tpot_s.mean)
    assert paces[0] == pytest.approx((run.latencies_s[0][0] - first.ttft_s.p50) / 10, rel=0.01)
    assert (run.felt_s(Objective.END_TO_END) == run.total_s).all()


def test_an_answer_of_one_token_has_no_pace() -> None:
    site, demand, strategies = two_requests()
    short = dataclasses.replace(demand.judged, output_tokens=np.array([[1, 1], [21, 41]]))
    run = run_cascade(site, Demand(short, short, demand.arrival_s), (50.0,), strategies, Dispatch.CAPACITY)
    assert len(run.felt_s(Objective.PACE)) == 1
    none = dataclasses.replace(demand.judged, output_tokens=np.ones((2, 2), np.int64))
    run = run_cascade(site, Demand(none, none, demand.arrival_s), (50.0,), strategies, Dispatch.CAPACITY)
    assert run.latency_s(Objective.PACE, 95.0) == 0.0
    deployer = Deployer(none, demand.arrival_s, [(s.replicas[0][0],) for s in strategies], 2, objective=Objective.PACE)
    deployment = present(deployer.deploy((50.0,)))
    assert deployment.latency_s == 0.0
