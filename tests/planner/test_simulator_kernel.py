"""The compiled scheduler takes the same steps as the one that serves, over random workloads, to the last token."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.slo_baselines import BatchPolicy
from penstock.planner_service.simulator import Dispatch, EngineLimits, Replica, kernel
from penstock.planner_service.simulator import Workload as TierWorkload
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
from penstock.planner_service.simulator.tier import KindTable, alone_latency, alone_times, assign, serve_kinds
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import EngineCpu, StepLatencyModel, StepLoad
from penstock.types.replies import FinishReason
from penstock.types.sampling import SamplingParams
from penstock.worker_service.scheduling.batching import BatchLimits, BatchScheduler
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.scheduling.policies import DecodeFirst, PrefillFirst
from penstock.worker_service.scheduling.sequence import Sequence
from tests.support.known_prefixes import KnowsPrefixes

POLICIES = {BatchPolicy.DECODE_FIRST: DecodeFirst, BatchPolicy.PREFILL_FIRST: PrefillFirst}
EARLY = 37  # tokens that a request which stops by itself leaves of those it may make
LATENCIES = [
    StepLatencyModel.linear(0.01, 1e-4, 1e-6),
    StepLatencyModel((1.0, 64.0, 256.0, 1024.0), (0.02, 0.021, 0.05, 0.3), 3e-7, 2e-8, 1e-7),
    StepLatencyModel.linear(0.0, 1e-3, 0.0),
    StepLatencyModel((0.0, 1.0), (0.004, 0.005), 1e-5, 1e-6, cpu=EngineCpu(0.003, 0.002, 0.01)),
    # contexts grow until the GPU takes longer than the CPU
    StepLatencyModel((0.0, 1.0), (0.004, 0.005), 1e-4, 1e-6, cpu=EngineCpu(0.008, 0.001, 0.01, overlapped=True)),
]


@dataclass(frozen=True)
class Workload:
    arrivals: list[float]
    prompts: list[int]
    outputs: list[int]
    priorities: list[int]
    cached: list[int]


@dataclass
class Replayed:
    first: list[float]
    finish: list[float]
    steps: int
    preemptions: int
    tokens: int


def sequence_of(work: Workload, r: int) -> Sequence:
    """Request r as a worker has it: it may make more tokens than it will, for it stops early."""
    most = work.outputs[r] + EARLY * (r % 2)
    return Sequence(
        str(r), [r] * work.prompts[r], SamplingParams(), max_output_tokens=most, priority=work.priorities[r]
    )


def replay(
    work: Workload,
    latency: StepLatencyModel,
    stages: int,
    blocks: int,
    block_tokens: int,
    limits: BatchLimits,
    policy: BatchPolicy = BatchPolicy.DECODE_FIRST,
) -> Replayed:
    """The worker's own scheduler in virtual time, a lane per stage."""
    count = len(work.arrivals)
    pools = [BlockPool(blocks, block_tokens, reuse=False) for _ in range(stages)]
    lanes = [KnowsPrefixes(limits, pool, work.cached, POLICIES[policy]()) for pool in pools]
    upcoming = [list(range(lane, count, stages)) for lane in range(stages)]
    ready = [0.0] * stages
    out = Replayed([0.0] * count, [0.0] * count, 0, 0, 0)
    entry_free = last_exit = 0.0
    while True:
        able = []
        for i, lane in enumerate(lanes):
            if not lane.idle:
                able.append((ready[i], i))
            elif upcoming[i]:
                able.append((max(ready[i], work.arrivals[upcoming[i][0]]), i))
        if not able:
            out.preemptions = sum(lane.preemptions for lane in lanes)
            return out
        at, i = min(able)
        start, scheduler = max(at, entry_free), lanes[i]
        while upcoming[i] and work.arrivals[upcoming[i][0]] <= start:
            r = upcoming[i].pop(0)
            scheduler.add(sequence_of(work, r))
        running = {sequence.request_id for sequence in scheduler.running}
        plan = scheduler.plan_step()
        context, pairs, ends = 0, 0.0, []
        for chunk in plan.chunks:
            context += chunk.start + chunk.count
            if chunk.sequence.pending == 1:
                ends.append(chunk.start + chunk.count)
            else:
                pairs += chunk.count * (chunk.start + 0.5 * (chunk.count + 1))
        gap = max(ends, default=0) * len(ends) - sum(ends)
        starts = sum(chunk.sequence.request_id not in running for chunk in plan.chunks)
        took = latency.step_s(StepLoad(plan.tokens, context, pairs, gap, requests=len(plan.chunks), prompts=starts))
        end = max(start + took, last_exit + took / stages)
        entry_free, last_exit, ready[i] = start + took / stages, end, end
        out.steps += 1
        out.tokens += plan.tokens
        scheduler.commit(plan, {c.sequence.request_id: [0] for c in plan.chunks if c.logits})
        for chunk in plan.chunks:
            sequence, r = chunk.sequence, int(chunk.sequence.request_id)
            if chunk.logits and sequence.output_tokens == 1:
                out.first[r] = end
            if sequence.output_tokens >= work.outputs[r]:
                out.finish[r] = end
                scheduler.finish(sequence.request_id, FinishReason.LENGTH)


def compiled(
    work: Workload,
    latency: StepLatencyModel,
    stages: int,
    blocks: int,
    block_tokens: int,
    limits: BatchLimits,
    policy: BatchPolicy = BatchPolicy.DECODE_FIRST,
    *,
    quiet: bool = True,
) -> Replayed:
    count = len(work.arrivals)
    out, engine = new_outcome(count), engine_of(latency, stages, blocks, block_tokens, limits, policy)
    never_late = Lateness(np.full(count, np.inf), count, LATENCY)
    kernel.simulate_replica(tier_workload(work).arrivals, engine, quiet, never_late, out)
    steps, preemptions, tokens = (int(out.counters[i]) for i in (STEPS, PREEMPTIONS, TOKENS))
    return Replayed(out.first_s.tolist(), out.finish_s.tolist(), steps, preemptions, tokens)


def engine_of(
    latency: StepLatencyModel, stages: int, blocks: int, block_tokens: int, limits: BatchLimits, policy: BatchPolicy
) -> Engine:
    batch = EngineLimits(limits.max_running, limits.max_step_tokens, block_tokens)
    replica = Replica(ReplicaShape(1, stages), latency, blocks * block_tokens * stages, batch)
    return replica.engine(policy.number)


def new_outcome(count: int) -> Outcome:
    return Outcome(np.zeros(count), np.zeros(count), np.zeros(COUNTERS))


def tier_workload(work: Workload) -> TierWorkload:
    columns = (work.prompts, work.outputs, work.priorities, work.cached)
    return TierWorkload(np.array(work.arrivals), *(np.array(column) for column in columns))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(1, 14))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.003, 0.05, 0.4]), min_size=count, max_size=count))
    prompts = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    priorities = draw(st.lists(st.sampled_from([0, 0, 0, 1, -2]), min_size=count, max_size=count))
    shares = draw(st.lists(st.sampled_from([0.0, 0.0, 0.3, 0.8, 1.0]), min_size=count, max_size=count))
    cached = [int(share * (prompt - 1)) for share, prompt in zip(shares, prompts, strict=True)]
    # by an irrational number: an arrival just when a step ends would make the last bit of a sum decide
    return Workload((np.cumsum(gaps) * np.pi / 3).tolist(), prompts, outputs, priorities, cached)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    workloads(),
    st.sampled_from(LATENCIES),
    st.integers(1, 3),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 40),
    st.integers(1, 6),
    st.sampled_from([1, 7, 32, 512]),
    st.sampled_from(BatchPolicy),
)
def test_the_twin_takes_the_same_steps(
    work: Workload,
    latency: StepLatencyModel,
    stages: int,
    block_tokens: int,
    spare_blocks: int,
    max_running: int,
    max_step_tokens: int,
    policy: BatchPolicy,
) -> None:
    needed = max(-(-(p + o) // block_tokens) for p, o in zip(work.prompts, work.outputs, strict=True))
    limits = BatchLimits(max_running, max_step_tokens)
    setting = (stages, needed + spare_blocks // block_tokens, block_tokens, limits, policy)
    served, twin = replay(work, latency, *setting), compiled(work, latency, *setting)
    assert twin.first == pytest.approx(served.first, rel=1e-12)
    assert twin.finish == pytest.approx(served.finish, rel=1e-12)
    assert (twin.steps, twin.preemptions, twin.tokens) == (served.steps, served.preemptions, served.tokens)
    stepwise = compiled(work, latency, *setting, quiet=False)  # a jump over quiet steps changes nothing
    assert twin.finish == pytest.approx(stepwise.finish, rel=1e-12)


@settings(deadline=None, max_examples=80)
@given(
    workloads(),
    st.sampled_from(LATENCIES),
    st.integers(1, 3),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 200),
    st.integers(1, 6),
    st.sampled_from([1, 7, 32, 512]),
    st.tuples(st.sampled_from([LATENCY, FIRST_TOKEN, PACE]), st.sampled_from([0.2, 2.0, np.inf]), st.integers(0, 14)),
)
def test_requests_in_order_are_served_as_any_to_the_last_bit(
    work: Workload,
    latency: StepLatencyModel,
    stages: int,
    block_tokens: int,
    spare_blocks: int,
    max_running: int,
    more_step_tokens: int,
    lateness: tuple[int, float, int],
) -> None:
    """Sums over a batch that are updated give what walking through it gives; a preemption is left to the other kernel."""
    measured, due_after_s, late_allowed = lateness
    count = len(work.arrivals)
    requests = tier_workload(replace(work, priorities=[0] * count)).arrivals
    needed = int((-(-(requests.prompt + requests.output) // block_tokens)).max())
    limits = BatchLimits(max_running, max_running + more_step_tokens)
    blocks = needed + spare_blocks // block_tokens
    engine = engine_of(latency, stages, blocks, block_tokens, limits, BatchPolicy.DECODE_FIRST)
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
    work = Workload([0.0, 0.0, 0.0, 0.1, 0.2], [30, 40, 50, 20, 100], [60, 50, 40, 30, 5], [0] * 5, [0] * 5)
    setting = (1, 11, 16, BatchLimits(4, 32))
    found = compiled(work, LATENCIES[1], *setting)
    assert found.preemptions > 0
    assert found.steps > 90
    assert found.finish == pytest.approx(compiled(work, LATENCIES[1], *setting, quiet=False).finish, rel=1e-12)
    served = replay(work, LATENCIES[1], *setting)
    assert found.finish == pytest.approx(served.finish, rel=1e-12)
    prompts_first = compiled(work, LATENCIES[1], *setting, BatchPolicy.PREFILL_FIRST)
    assert prompts_first.preemptions > 0
    assert prompts_first.first[1] < found.first[1]


def test_a_cached_prefix_saves_its_computation_once() -> None:
    """500 of 520 tokens are cached: the first token comes after a step of 20. After a preemption all is computed again."""
    latency, cached = LATENCIES[2], Workload([0.0], [520], [10], [0], [500])
    setting = (1, 40, 16, BatchLimits(4, 1000))
    found = compiled(cached, latency, *setting)
    assert found.first[0] == pytest.approx(0.02)
    assert found.tokens == 29
    assert compiled(replace(cached, cached=[0]), latency, *setting).first[0] == pytest.approx(0.52)
    # the second has the higher priority, and takes the blocks of the first when it needs them
    both = Workload([0.0, 0.0253], [520, 100], [60, 40], [0, 1], [500, 0])
    setting = (1, 41, 16, BatchLimits(4, 1000))
    found = compiled(both, latency, *setting)
    served = replay(both, latency, *setting)
    assert (found.preemptions, found.tokens) == (served.preemptions, served.tokens)
    assert found.preemptions > 0
    assert found.tokens > 520 + 100
    assert found.finish == pytest.approx(served.finish, rel=1e-12)


def test_what_the_workers_cache_finds_is_what_the_kernel_saves() -> None:
    """Chats on the scheduler that serves, with its prefix cache and KV for all of them: with the tokens that it found cached
    the kernel takes the same steps."""
    rng, latency, limits, block_tokens = np.random.default_rng(5), LATENCIES[1], BatchLimits(8, 64), 4
    scheduler = BatchScheduler(limits, BlockPool(4000, block_tokens), DecodeFirst())
    chats: list[list[int]] = [list(range(100 * c, 100 * c + 30)) for c in range(5)]
    prompts, arrivals, outputs, at = [], [], [], 0.0
    for turn in range(40):
        chat = chats[turn % 5]
        chat += rng.integers(1000, 2000, int(rng.integers(1, 40))).tolist()
        at += float(rng.exponential(0.3))
        prompts.append(list(chat))
        arrivals.append(at)
        outputs.append(int(rng.integers(1, 30)))
    now, upcoming, finish = 0.0, 0, [0.0] * len(prompts)
    cached = [0] * len(prompts)
    while upcoming < len(prompts) or not scheduler.idle:
        if scheduler.idle:
            now = max(now, arrivals[upcoming])
        while upcoming < len(prompts) and arrivals[upcoming] <= now:
            params = SamplingParams()
            scheduler.add(Sequence(str(upcoming), prompts[upcoming], params, max_output_tokens=outputs[upcoming]))
            upcoming += 1
        plan = scheduler.plan_step()
        ends = [chunk.start + chunk.count for chunk in plan.chunks if chunk.sequence.pending == 1]
        pairs = sum(c.count * (c.start + 0.5 * (c.count + 1)) for c in plan.chunks if c.sequence.pending != 1)
        gap = max(ends, default=0) * len(ends) - sum(ends)
        context = sum(chunk.start + chunk.count for chunk in plan.chunks)
        now += latency.step_s(StepLoad(plan.tokens, context, pairs, gap))
        scheduler.commit(plan, {c.sequence.request_id: [0] for c in plan.chunks if c.logits})
        for chunk in plan.chunks:
            r = int(chunk.sequence.request_id)
            cached[r] = chunk.sequence.cached_prompt_tokens
            if chunk.sequence.output_tokens >= outputs[r]:
                finish[r] = now
                scheduler.finish(str(r), FinishReason.LENGTH)
    assert np.mean(np.array(cached) > 0) > 0.7
    work = Workload(arrivals, [len(prompt) for prompt in prompts], outputs, [0] * len(prompts), cached)
    found = compiled(work, latency, 1, 4000, block_tokens, limits)
    assert found.finish == pytest.approx(finish, rel=1e-12)
    whole = compiled(replace(work, cached=[0] * len(prompts)), latency, 1, 4000, block_tokens, limits)
    assert sum(whole.finish) > sum(finish)


@settings(deadline=None, max_examples=40)
@given(workloads(), st.sampled_from(LATENCIES), st.integers(1, 3), st.sampled_from([7, 32, 512]))
def test_nothing_is_faster_than_a_request_alone_with_its_cached_prefix(
    work: Workload, latency: StepLatencyModel, stages: int, max_step_tokens: int
) -> None:
    """What proofs rest on. Alone, and with room in each step for whole prompts, a request takes exactly that long."""
    whole = tier_workload(work)
    one = Replica(ReplicaShape(1, stages), latency, 512 * stages, EngineLimits(4, max_step_tokens))
    alone = alone_times(whole, one)
    served = serve_kinds(whole, KindTable([one]), np.zeros(1, np.int64), np.ones(1), Dispatch.ROUND_ROBIN)
    assert (served.first_s - whole.arrival_s >= alone.first_s * (1 - 1e-9)).all()
    assert (served.finish_s - whole.arrival_s >= alone.finish_s * (1 - 1e-9)).all()
    for r in range(len(whole)):
        single = serve_kinds(
            whole.subset(np.array([r])), KindTable([one]), np.zeros(1, np.int64), np.ones(1), Dispatch.ROUND_ROBIN
        )
        assert single.finish_s[0] - whole.arrival_s[r] == pytest.approx(alone.finish_s[r], rel=1e-9)


def test_a_higher_priority_overtakes_in_the_queue_and_is_preempted_last() -> None:
    """One place: the important request, last to come, is served second; and the order of the others stays."""
    setting = (1, 20, 16, BatchLimits(1, 64))
    work = Workload([0.0, 0.1, 0.2, 0.3], [20] * 4, [50] * 4, [0, 0, 0, 5], [0] * 4)
    finish = compiled(work, LATENCIES[0], *setting).finish
    assert np.argsort(finish).tolist() == [0, 3, 1, 2]
    assert finish == pytest.approx(replay(work, LATENCIES[0], *setting).finish, rel=1e-12)
    # KV for one and a half of two: the one that is not important gives way, though it came first
    setting = (1, 9, 16, BatchLimits(2, 64))
    work = Workload([0.0, 0.0], [40, 40], [50, 50], [0, 1], [0, 0])
    found = compiled(work, LATENCIES[0], *setting)
    assert found.preemptions > 0
    assert found.finish[1] < found.finish[0]
    assert found.finish == pytest.approx(replay(work, LATENCIES[0], *setting).finish, rel=1e-12)


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
    whole = tier_workload(work)
    table, places = KindTable(kinds), np.array(kind)
    owners = assign(whole.priority, places, np.ones(3), Dispatch.ROUND_ROBIN)
    served = serve_kinds(whole, table, np.array(kind), np.ones(3), Dispatch.ROUND_ROBIN)
    counted = np.arange(len(whole)) % every == 0
    exact = float(np.percentile((served.finish_s - whole.arrival_s)[counted], percentile))
    alone = np.array([alone_latency(whole, one) for one in kinds])
    tier, limit = table.tier(owners, places), exact * share
    unlimited_s, found = (
        kernel.percentile_within(whole.arrivals, tier, alone, counted, percentile, limit_s, LATENCY)
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
