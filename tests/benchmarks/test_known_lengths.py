"""What is known of reply lengths, against sums that are easy to believe; and placement by it on a few requests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.known_lengths import drawn
from benchmarks.length_policies import (
    ExactLength,
    ForkingCluster,
    Form,
    LengthDistribution,
    MeanLength,
    policy_of,
)
from penstock.planner_service.simulator import Replica, Workload
from penstock.planner_service.simulator.loop import serve_on
from penstock.planner_service.simulator.placed import STILL
from penstock.planner_service.simulator.policies import Policy
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=20)
NONE = np.zeros(1, np.int64)
REPLICA = Replica(ReplicaShape(1, 1), StepLatencyModel.linear(0.01, 1e-4, 0.0), 100_000)


@given(LENGTHS, st.integers(0, 40))
def test_a_distribution_expects_what_longer_replies_had_left(lengths: list[int], produced: int) -> None:
    left = LengthDistribution(np.array(lengths)).left(NONE, np.array([produced]))[0]
    longer = [length - produced for length in lengths if length > produced]
    assert left == pytest.approx(np.mean(longer) if longer else 1.0)


@given(LENGTHS, st.integers(0, 40))
def test_overlap_is_the_mean_of_the_shorter_of_both(lengths: list[int], produced: int) -> None:
    overlap = LengthDistribution(np.array(lengths)).overlap(NONE, np.array([produced]), 0)[0]
    longer = [length - produced for length in lengths if length > produced]
    pairs = [min(left, new) for left in longer for new in lengths]
    assert overlap == pytest.approx(np.mean(pairs) if pairs else 1.0)


def test_other_sources() -> None:
    requests, produced = np.array([0, 2]), np.array([3, 20])
    assert MeanLength(np.array([5, 15])).left(requests, produced).tolist() == [7, 1]
    exact = ExactLength(np.array([10, 4, 25]))
    assert exact.left(requests, produced).tolist() == [7, 5]
    assert exact.overlap(requests, produced, 1).tolist() == [4, 4]


@pytest.mark.parametrize("form", Form)
def test_a_request_avoids_the_instance_whose_replies_are_long(form: Form) -> None:
    """Two instances with one request each, a long one and a short one: the third joins the short one."""
    work = Workload(np.array([0.0, 0.01, 0.3, 0.31]), np.full(4, 50), np.array([2000, 100, 600, 1]))
    cluster = ForkingCluster(work, [REPLICA] * 2, STILL)
    serve_on(cluster, policy_of(ExactLength(work.output_tokens), form))
    long, short, third, _ = cluster.home.tolist()
    assert long != short
    assert third == short


def test_running_ahead_changes_nothing_and_tells_the_end() -> None:
    work = Workload(np.array([0.0]), np.array([50]), np.array([40]))
    ends = list[float]()

    class Ahead(Policy):
        def place(self, request: int) -> int:
            assert isinstance(self.cluster, ForkingCluster)
            ends.append(self.cluster.end_s(request, 0, 0.0, work.output_tokens))
            return 0

    served = serve_on(ForkingCluster(work, [REPLICA], STILL), Ahead)
    assert served.finish_s.tolist() == ends


def test_every_request_is_drawn_once_before_any_comes_again() -> None:
    work = Workload(np.arange(3.0), np.array([1, 2, 3]), np.array([4, 5, 6]))
    some = drawn(work, 2.0, 6, seed=1)
    assert sorted(some.input_tokens[:3].tolist()) == sorted(some.input_tokens[3:].tolist()) == [1, 2, 3]
    assert (some.output_tokens == some.input_tokens + 3).all()
    assert some.arrival_s[0] == 0.0
