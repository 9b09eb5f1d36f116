"""The compiled scheduler takes the same steps as the one that serves, over random workloads, to the last token."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.slo_baselines import BatchPolicy
from penstock.planner_service.simulator import Dispatch, EngineLimits, Replica, Workload, kernel
from penstock.planner_service.simulator.batch_step import (
    COUNTERS,
    FIRST_TOKEN,
    LATENCY,
    PACE,
    PREEMPTIONS,
    STEPS,
    TOKENS,
    Engine,
    Lateness,
    Outcome,
)
from penstock.planner_service.simulator.in_order import PREEMPTED, serve_in_order
from penstock.planner_service.simulator.tier import KindTable, alone_times, assign, serve_kinds
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import EngineCpu, StepLatencyModel
from penstock.worker_service.scheduling.batching import BatchLimits, BatchScheduler
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.scheduling.policies import DecodeFirst, PrefillFirst
from tests.support.worker_replay import KnowsPrefixes, Replayed, replay

POLICIES = {BatchPolicy.DECODE_FIRST: DecodeFirst, BatchPolicy.PREFILL_FIRST: PrefillFirst}
LATENCIES = [
    StepLatencyModel.linear(0.01, 1e-4, 1e-6),
    StepLatencyModel((1.0, 64.0, 256.0, 1024.0), (0.02, 0.021, 0.05, 0.3), 3e-7, 2e-8, 1e-7),
    StepLatencyModel.linear(0.0, 1e-3, 0.0),
    StepLatencyModel((0.0, 1.0), (0.004, 0.005), 1e-5, 1e-6, cpu=EngineCpu(0.003, 0.002, 0.01)),
    # contexts grow until the GPU takes longer than the CPU
    StepLatencyModel((0.0, 1.0), (0.004, 0.005), 1e-4, 1e-6, cpu=EngineCpu(0.008, 0.001, 0.01, overlapped=True)),
]


@dataclass(frozen=True)
class Setting:
    """A replica. blocks: of each stage's KV."""

    latency: StepLatencyModel
    stages: int
    blocks: int
    block_tokens: int
    limits: BatchLimits
    policy: BatchPolicy = BatchPolicy.DECODE_FIRST

    @property
    def engine(self) -> Engine:
        batch = EngineLimits(self.limits.max_running, self.limits.max_step_tokens, self.block_tokens)
        kv_tokens = self.blocks * self.block_tokens * self.stages
        return Replica(ReplicaShape(1, self.stages), self.latency, kv_tokens, batch).engine(self.policy.number)


def replayed(work: Workload, at: Setting) -> Replayed:
    """By the worker's own scheduler, a lane per stage."""
    pools = [BlockPool(at.blocks, at.block_tokens, reuse=False) for _ in range(at.stages)]
    cached = work.cached_tokens.tolist()
    return replay(work, at.latency, [KnowsPrefixes(at.limits, pool, cached, POLICIES[at.policy]()) for pool in pools])


def compiled(work: Workload, at: Setting, *, quiet: bool = True) -> Replayed:
    count = len(work)
    out, never_late = new_outcome(count), Lateness(np.full(count, np.inf), count, LATENCY)
    kernel.simulate_replica(work.arrivals, at.engine, quiet, never_late, out)
    steps, preemptions, tokens = (int(out.counters[i]) for i in (STEPS, PREEMPTIONS, TOKENS))
    cached = work.cached_tokens.tolist()
    return Replayed(out.first_s.tolist(), out.finish_s.tolist(), cached, steps, preemptions, tokens)


def new_outcome(count: int) -> Outcome:
    return Outcome(np.zeros(count), np.zeros(count), np.zeros(COUNTERS))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(1, 14))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.003, 0.05, 0.4]), min_size=count, max_size=count))
    prompts, outputs, priorities, shares = (
        np.array(draw(st.lists(values, min_size=count, max_size=count)))
        for values in (
            st.integers(1, 60),
            st.integers(1, 40),
            st.sampled_from([0, 0, 0, 1, -2]),
            st.sampled_from([0.0, 0.0, 0.3, 0.8, 1.0]),
        )
    )
    cached = (shares * (prompts - 1)).astype(np.int64)
    # by an irrational number: an arrival just when a step ends would make the last bit of a sum decide
    return Workload(np.cumsum(gaps) * np.pi / 3, prompts, outputs, priorities, cached)


@st.composite
def settings_of(draw: st.DrawFn, work: Workload, most_spare_blocks: int) -> Setting:
    """KV for the longest request of the workload, and not much more."""
    block_tokens, max_running = draw(st.sampled_from([1, 4, 16])), draw(st.integers(1, 6))
    needed = int((-(-(work.input_tokens + work.output_tokens) // block_tokens)).max())
    spare = draw(st.integers(0, most_spare_blocks)) // block_tokens
    limits = BatchLimits(max_running, draw(st.sampled_from([1, 7, 32, 512])))
    latency, stages = draw(st.sampled_from(LATENCIES)), draw(st.integers(1, 3))
    return Setting(latency, stages, needed + spare, block_tokens, limits, draw(st.sampled_from(BatchPolicy)))


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(workloads(), st.data())
def test_the_twin_takes_the_same_steps(work: Workload, data: st.DataObject) -> None:
    at = data.draw(settings_of(work, 40))
    served, twin = replayed(work, at), compiled(work, at)
    assert twin.first == pytest.approx(served.first, rel=1e-12)
    assert twin.finish == pytest.approx(served.finish, rel=1e-12)
    assert (twin.steps, twin.preemptions, twin.tokens) == (served.steps, served.preemptions, served.tokens)
    stepwise = compiled(work, at, quiet=False)  # a jump over quiet steps changes nothing
    assert twin.finish == pytest.approx(stepwise.finish, rel=1e-12)


@settings(deadline=None, max_examples=80)
@given(
    workloads(),
    st.data(),
    st.tuples(st.sampled_from([LATENCY, FIRST_TOKEN, PACE]), st.sampled_from([0.2, 2.0, np.inf]), st.integers(0, 14)),
)
def test_requests_in_order_are_served_as_any_to_the_last_bit(
    work: Workload, data: st.DataObject, lateness: tuple[int, float, int]
) -> None:
    """Sums over a batch that are updated give what walking through it gives; a preemption is left to the other kernel."""
    measured, due_after_s, late_allowed = lateness
    count, drawn = len(work), data.draw(settings_of(work, 200))
    requests = replace(work, priority=np.zeros(count, np.int64)).arrivals
    decodes_fit = replace(drawn.limits, max_step_tokens=drawn.limits.max_running + drawn.limits.max_step_tokens)
    engine = replace(drawn, limits=decodes_fit, policy=BatchPolicy.DECODE_FIRST).engine
    due_s = np.full(count, due_after_s / 10) if measured == PACE else requests.arrival_s + due_after_s
    outputs_of_any, outputs_of_in_order = new_outcome(count), new_outcome(count)
    given_up = Lateness(due_s, late_allowed, measured)
    late = kernel.simulate_any(requests, engine, True, given_up, outputs_of_any)
    late_in_order = serve_in_order(requests, engine, given_up, outputs_of_in_order)
    if late_in_order == PREEMPTED:
        assert outputs_of_any.counters[PREEMPTIONS] > 0
        assert not outputs_of_in_order.counters.any()
        return
    assert late_in_order == late
    for one, other in zip(outputs_of_in_order, outputs_of_any, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_cases_that_matter_are_reached() -> None:
    """Preemption, waiting for room, chunked prompts and quiet steps all happen; and with prompts first, decodes wait."""
    lengths = np.array([30, 40, 50, 20, 100]), np.array([60, 50, 40, 30, 5])
    work = Workload(np.array([0.0, 0.0, 0.0, 0.1, 0.2]), *lengths)
    at = Setting(LATENCIES[1], 1, 11, 16, BatchLimits(4, 32))
    found = compiled(work, at)
    assert found.preemptions > 0
    assert found.steps > 90
    assert found.finish == pytest.approx(compiled(work, at, quiet=False).finish, rel=1e-12)
    served = replayed(work, at)
    assert found.finish == pytest.approx(served.finish, rel=1e-12)
    prompts_first = compiled(work, replace(at, policy=BatchPolicy.PREFILL_FIRST))
    assert prompts_first.preemptions > 0
    assert prompts_first.first[1] < found.first[1]


def test_what_the_workers_cache_finds_is_what_the_kernel_saves() -> None:
    """Chats on the scheduler that serves, with its prefix cache and KV for all of them: with the tokens that it found cached
    the kernel takes the same steps."""
    rng, latency, limits, block_tokens = np.random.default_rng(5), LATENCIES[1], BatchLimits(8, 64), 4
    chats: list[list[int]] = [list(range(100 * c, 100 * c + 30)) for c in range(5)]
    prompts = list[list[int]]()
    for turn in range(40):
        chat = chats[turn % 5]
        chat += rng.integers(1000, 2000, int(rng.integers(1, 40))).tolist()
        prompts.append(list(chat))
    lengths = np.array([len(prompt) for prompt in prompts]), rng.integers(1, 30, 40)
    work = Workload(np.cumsum(rng.exponential(0.3, 40)), *lengths)
    scheduler = BatchScheduler(limits, BlockPool(4000, block_tokens), DecodeFirst())
    served = replay(work, latency, [scheduler], prompts.__getitem__)
    cached = np.array(served.cached)
    assert np.mean(cached > 0) > 0.7
    at = Setting(latency, 1, 4000, block_tokens, limits)
    found = compiled(replace(work, cached_tokens=cached), at)
    assert found.finish == pytest.approx(served.finish, rel=1e-12)
    whole = compiled(work, at)
    assert sum(whole.finish) > sum(served.finish)


@settings(deadline=None, max_examples=40)
@given(workloads(), st.sampled_from(LATENCIES), st.integers(1, 3), st.sampled_from([7, 32, 512]))
def test_nothing_is_faster_than_a_request_alone_with_its_cached_prefix(
    work: Workload, latency: StepLatencyModel, stages: int, max_step_tokens: int
) -> None:
    """What proofs rest on. Alone, and with room in each step for whole prompts, a request takes exactly that long."""
    one = Replica(ReplicaShape(1, stages), latency, 512 * stages, EngineLimits(4, max_step_tokens))
    alone = alone_times(work, one)
    served = serve_kinds(work, KindTable([one]), np.zeros(1, np.int64), np.ones(1), Dispatch.ROUND_ROBIN)
    assert (served.first_s - work.arrival_s >= alone.first_s * (1 - 1e-9)).all()
    assert (served.finish_s - work.arrival_s >= alone.finish_s * (1 - 1e-9)).all()
    for r in range(len(work)):
        single = serve_kinds(
            work.subset(np.array([r])), KindTable([one]), np.zeros(1, np.int64), np.ones(1), Dispatch.ROUND_ROBIN
        )
        assert single.finish_s[0] - work.arrival_s[r] == pytest.approx(alone.finish_s[r], rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    workloads(),
    st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=4),
    st.sampled_from([50.0, 80.0, 95.0, 100.0]),
    st.floats(0.2, 1.6),
    st.integers(1, 3),
)
def test_giving_up_early_loses_nothing(
    work: Workload, kind: list[int], percentile: float, share: float, every: int
) -> None:
    """A simulation is given up only where its percentile would not be under the limit; else it is what numpy says of those
    requests that count."""
    kinds = [
        Replica(ReplicaShape(1, pp), LATENCIES[k], 512 * pp, EngineLimits(3, 32)) for k, pp in enumerate((1, 2, 1))
    ]
    table, places = KindTable(kinds), np.array(kind)
    owners = assign(work.priority, places, np.ones(3), Dispatch.ROUND_ROBIN)
    served = serve_kinds(work, table, np.array(kind), np.ones(3), Dispatch.ROUND_ROBIN)
    counted = np.arange(len(work)) % every == 0
    exact = float(np.percentile((served.finish_s - work.arrival_s)[counted], percentile))
    alone = np.array([alone_times(work, one).finish_s for one in kinds])
    tier, limit = table.tier(owners, places), exact * share
    unlimited_s, found = (
        kernel.percentile_within(work.arrivals, tier, alone, counted, percentile, limit_s, LATENCY)
        for limit_s in (np.inf, limit)
    )
    assert unlimited_s == pytest.approx(exact, rel=1e-12)
    assert found == pytest.approx(exact, rel=1e-12) or (found == np.inf and share < 1 + 1e-9)


def test_replicas_take_their_turns_in_the_order_of_a_sort() -> None:
    """Turn i of a replica stands at (i + 1/2) / share; equal ones are ordered by replica, also where kinds alternate."""
    rng = np.random.default_rng(3)
    for count in range(0, 400, 7):
        kinds, replicas = int(rng.integers(2, 5)), int(rng.integers(2, 40))
        kind = np.sort(rng.integers(0, kinds, replicas)) if count % 2 else rng.integers(0, kinds, replicas)
        capacity = rng.uniform(0.1, 50, kinds) if count % 3 else rng.integers(1, 4, kinds).astype(float)
        share = capacity[kind] / capacity[kind].sum()
        turns = sorted(
            ((i + 0.5) / share[r], r) for r in range(replicas) for i in range(int(np.ceil(share[r] * count)) + 1)
        )
        owner = assign(np.zeros(count, np.int64), kind, capacity, Dispatch.CAPACITY)
        if (kind == kind[0]).all():
            assert owner.tolist() == [r % replicas for r in range(count)]
        else:
            assert owner.tolist() == [r for _, r in turns[:count]]
