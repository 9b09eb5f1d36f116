"""The cluster in virtual time: its instances are the scheduler that serves, nothing is lost on the way, moves pay off."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.cluster_policies import MemoryAware, RoundRobin
from penstock.planner_service.simulator import EngineLimits, Replica, Workload
from penstock.planner_service.simulator.batch_step import FREE
from penstock.planner_service.simulator.cluster import Cluster, Moves, Transfer
from penstock.planner_service.simulator.loop import serve_on
from penstock.planner_service.simulator.policies import LeastWork, Policy
from penstock.planner_service.simulator.staged import Staged
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.stages.layout import StageLayout
from penstock.types.plans import QoeModel, Stage
from penstock.worker_service.scheduling.batching import BatchLimits
from penstock.worker_service.scheduling.blocks import BlockPool
from tests.support.worker_replay import KnowsPrefixes, finish_on_instances

QOE = QoeModel(0.005, 1e-5, 1e-8, 0.0, 2e-7)
LAYOUT = StageLayout((Stage(0, 300, 2), Stage(300, 700, 1), Stage(700, 2000, 1)))
MOVES = Moves(1e5, 2e10, 1.1)


def replica(kv_tokens: int = 6000) -> Replica:
    latency = StepLatencyModel.linear(0.005, 1e-5, 2e-7)
    return Replica(ReplicaShape(1, 1), latency, kv_tokens, EngineLimits(32, 256, 16))


def workload(seed: int, requests: int, rate: float) -> Workload:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests))
    return Workload(arrivals - arrivals[0], rng.integers(10, 900, requests), rng.integers(1, 250, requests))


def reusing(work: Workload, seed: int) -> Workload:
    """The workload with random parts of its prompts cached, of every third request all but a token, of every third none."""
    count = len(work)
    share = np.where(np.arange(count) % 3 == 0, 1.0, np.random.default_rng(seed).random(count)) * (
        np.arange(count) % 3 < 2
    )
    return replace(work, cached_tokens=(share * (work.input_tokens - 1)).astype(np.int64))


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_several_instances_are_as_many_workers(seed: int, reuse: bool) -> None:
    """Three instances, priorities, requests that stop early, preemptions."""
    rng = np.random.default_rng(seed)
    plain = workload(seed, 240, 34.0)
    work = Workload(plain.arrival_s, plain.input_tokens, plain.output_tokens, rng.choice([0, 0, 2, -1], len(plain)))
    work = reusing(work, seed) if reuse else work
    still, one = Moves(1e5, 1e9, 0.0), replica(3000)
    served = serve_on(Cluster(work, [one] * 3, still), RoundRobin)
    limits, cached = BatchLimits(one.limits.max_running, one.limits.max_step_tokens), work.cached_tokens
    pools = [BlockPool(one.lane_blocks, one.limits.block_tokens, reuse=False) for _ in range(3)]
    lanes = [KnowsPrefixes(limits, pool, cached[i::3].tolist()) for i, pool in enumerate(pools)]
    finish = finish_on_instances(work, one.latency, lanes)
    np.testing.assert_allclose(served.finish_s, finish, rtol=1e-12, atol=1e-12)
    assert sum(lane.preemptions for lane in lanes) > 0


class Watched(Staged):
    """Checks, at every tick, that each request is in one place, and KV is neither lost nor lent twice."""

    def tick(self, ended: Sequence[int], completed: Sequence[tuple[Transfer, bool]]) -> None:
        super().tick(ended, completed)
        cluster, seen = self.cluster, list[int]()
        for i in range(cluster.instances):
            there = [*cluster.running(i).tolist(), *cluster.waiting(i).tolist()]
            seen += there
            held = cluster.blocks[np.array(there, np.int64)].sum() if there else 0
            aside = sum(t.reserved for t in cluster.transfers if t.target == i)
            assert held + aside + cluster.parts[i].batch.counts[FREE] == cluster.replica.lane_blocks
        assert len(seen) == len(set(seen))
        assert all(cluster.finish_s[r] > 0 for r in ended)


@pytest.mark.parametrize("reuse", [False, True])
def test_nothing_is_lost_or_doubled_while_requests_move(reuse: bool) -> None:
    work = workload(3, 500, 25.0)
    work = reusing(work, 3) if reuse else work
    policies = list[Watched]()

    def policy(cluster: Cluster) -> Policy:
        policies.append(Watched(cluster, LAYOUT, QOE))
        return policies[-1]

    served = serve_on(Cluster(work, [replica()] * 4, MOVES), policy)
    assert (served.finish_s >= served.first_s).all()
    assert (served.first_s >= work.arrival_s).all()
    assert (served.length - work.input_tokens).sum() == work.output_tokens.sum()
    assert served.moved > 50
    again = serve_on(Cluster(work, [replica()] * 4, MOVES), policy)
    assert (again.finish_s == served.finish_s).all()
    assert policies[0]._boundary != [300.0, 300.0, 700.0, 2000.0]


def test_no_idle_kv_no_move() -> None:
    """The last stage has room for hardly more than one long request: what cannot go there stays, and is served."""
    work = workload(5, 200, 20.0)
    served = serve_on(Cluster(work, [replica(1200)] * 4, MOVES), lambda c: Watched(c, LAYOUT, QOE))
    assert (served.length - work.input_tokens).sum() == work.output_tokens.sum()


def test_least_work_avoids_the_instance_that_computes_a_long_prompt() -> None:
    """Before and after it has been published: a round robin sends every second request behind it."""
    arrivals = np.concatenate([[0.0], 0.01 + 0.02 * np.arange(40)])
    work = Workload(arrivals, np.array([5000] + [20] * 40), np.full(41, 2))
    served = serve_on(Cluster(work, [replica(8000)] * 2, Moves(1e5, 1e9)), LeastWork)
    in_turns = serve_on(Cluster(work, [replica(8000)] * 2, Moves(1e5, 1e9)), RoundRobin)
    waits, waits_in_turns = ((s.first_s - work.arrival_s)[1:] for s in (served, in_turns))
    assert waits.max() < 0.05 < waits_in_turns.max()
    assert served.moved == 0


def test_memory_aware_dispatch_moves_what_threatens_to_run_out_of_kv() -> None:
    work = workload(7, 400, 22.0)
    served = serve_on(Cluster(work, [replica(4000)] * 4, MOVES), MemoryAware)
    assert (served.length - work.input_tokens).sum() == work.output_tokens.sum()
    assert served.moved > 0


def test_batches_of_unlike_lengths_take_longer() -> None:
    """Two decodes of one length cost what they cost; of 100 and 1,900 tokens, 1 + 1.1 (1 - 1,000 / 1,900) times as much."""
    both = Replica(ReplicaShape(1, 1), StepLatencyModel.linear(0.005, 1e-5, 1e-4), 6000, EngineLimits(32, 4096, 16))
    for inputs, factor in (((1000, 1000), 1.0), ((100, 1900), 1 + 1.1 * (1 - 1000 / 1900))):
        work = Workload(np.zeros(2), np.array(inputs), np.array([3, 3]))
        times = {mixed: serve_on(Cluster(work, [both], Moves(1e5, 1e9, mixed)), RoundRobin) for mixed in (0.0, 1.1)}
        last = {mixed: served.finish_s.max() for mixed, served in times.items()}
        decodes = 2 * 2000 * 1e-4  # attention of two steps, but for the few tokens that they add
        assert last[1.1] - last[0.0] == pytest.approx(decodes * (factor - 1), rel=0.02, abs=1e-9)


def test_a_layout_of_other_instances_is_refused() -> None:
    def policy(cluster: Cluster) -> Policy:
        return Staged(cluster, StageLayout.single(3, 2000), QOE)

    with pytest.raises(InvalidRequest, match="holds 3 instances"):
        serve_on(Cluster(workload(1, 5, 1.0), [replica()] * 4, MOVES), policy)
    with pytest.raises(InvalidRequest, match="KV"):
        serve_on(Cluster(workload(1, 50, 1.0), [replica(320)] * 4, MOVES), RoundRobin)
