"""The cluster in virtual time: its instances are the scheduler that serves, nothing is lost on the way, moves pay off."""

from collections.abc import Sequence

import numpy as np
import pytest

from planner_service.simulator import EngineLimits, Replica, Workload, serve
from planner_service.simulator import instance_kernel as kernel
from planner_service.simulator.cluster import (
    Cluster,
    ClusterServed,
    MemoryAware,
    Moves,
    Policy,
    Refinement,
    RoundRobin,
    Staged,
    Transfer,
    serve_cluster,
)
from services.domain import InvalidRequest, StepLatencyModel
from services.domain.hardware import ReplicaShape
from services.domain.stages import QoeModel, Stage, StageLayout

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


@pytest.mark.parametrize("seed", range(6))
def test_an_instance_takes_the_steps_of_the_replica_kernel(seed: int) -> None:
    """Preemptions included: KV is scarce."""
    work = workload(seed, 250, 14.0)
    alone = serve(work, [replica(3000 + 600 * seed)])
    here = serve_cluster(work, replica(3000 + 600 * seed), 1, Moves(1e5, 1e9, 0.0), RoundRobin)
    assert alone.preemptions > 0
    np.testing.assert_allclose(here.first_s, alone.first_s, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(here.finish_s, alone.finish_s, rtol=1e-12, atol=1e-12)


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
            assert held + aside + cluster.counts[i, kernel.FREE] == cluster.replica.lane_blocks
        assert len(seen) == len(set(seen))
        assert all(cluster.first_s[r] > 0 for r in ended)


@pytest.mark.parametrize("refinement", Refinement)
def test_nothing_is_lost_or_doubled_while_requests_move(refinement: Refinement) -> None:
    work = workload(3, 500, 25.0)

    def run() -> ClusterServed:
        return serve_cluster(work, replica(), 4, MOVES, lambda c: Watched(c, LAYOUT, QOE, refinement))

    served = run()
    assert (served.finish_s >= served.first_s).all()
    assert (served.first_s >= work.arrival_s).all()
    assert served.produced.sum() == work.output_tokens.sum()
    assert served.moved > 50
    again = run()
    assert (again.finish_s == served.finish_s).all()
    fixed = all(cuts == [300.0, 700.0] for _, cuts in served.boundaries)
    assert fixed == (refinement is Refinement.NONE)


def test_no_idle_kv_no_move() -> None:
    """The last stage has room for hardly more than one long request: what cannot go there stays, and is served."""
    work = workload(5, 200, 20.0)
    served = serve_cluster(work, replica(1200), 4, MOVES, lambda c: Watched(c, LAYOUT, QOE))
    assert served.produced.sum() == work.output_tokens.sum()


def test_memory_aware_dispatch_moves_what_threatens_to_run_out_of_kv() -> None:
    work = workload(7, 400, 22.0)
    served = serve_cluster(work, replica(4000), 4, MOVES, MemoryAware)
    assert served.produced.sum() == work.output_tokens.sum()
    assert served.moved > 0


def test_batches_of_unlike_lengths_take_longer() -> None:
    """Two decodes of one length cost what they cost; of 100 and 1,900 tokens, 1 + 1.1 (1 - 1,000 / 1,900) times as much."""
    both = Replica(ReplicaShape(1, 1), StepLatencyModel.linear(0.005, 1e-5, 1e-4), 6000, EngineLimits(32, 4096, 16))
    for inputs, factor in (((1000, 1000), 1.0), ((100, 1900), 1 + 1.1 * (1 - 1000 / 1900))):
        work = Workload(np.zeros(2), np.array(inputs), np.array([3, 3]))
        times = {mixed: serve_cluster(work, both, 1, Moves(1e5, 1e9, mixed), RoundRobin) for mixed in (0.0, 1.1)}
        last = {mixed: served.finish_s.max() for mixed, served in times.items()}
        decodes = 2 * 2000 * 1e-4  # attention of two steps, but for the few tokens that they add
        assert last[1.1] - last[0.0] == pytest.approx(decodes * (factor - 1), rel=0.02, abs=1e-9)


def test_a_layout_of_other_instances_is_refused() -> None:
    def policy(cluster: Cluster) -> Policy:
        return Staged(cluster, StageLayout.single(3, 2000), QOE)

    with pytest.raises(InvalidRequest, match="holds 3 instances"):
        serve_cluster(workload(1, 5, 1.0), replica(), 4, MOVES, policy)
    with pytest.raises(InvalidRequest, match="KV"):
        serve_cluster(workload(1, 50, 1.0), replica(320), 4, MOVES, RoundRobin)
