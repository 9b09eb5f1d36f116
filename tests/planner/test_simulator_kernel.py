"""The compiled scheduler takes the same steps as the one that serves, over random workloads, to the last token."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_service.simulator import Dispatch, EngineLimits, Replica, kernel
from planner_service.simulator import Workload as TierWorkload
from planner_service.simulator.tier import KindTable, alone_latency, serve_kinds
from services.domain import FinishReason, SamplingParams, StepLatencyModel, StepLoad
from services.domain.hardware import ReplicaShape
from worker_service.scheduling import BatchLimits, BatchScheduler, BlockPool, Sequence

LATENCIES = [
    StepLatencyModel.linear(0.01, 1e-4, 1e-6),
    StepLatencyModel((1.0, 64.0, 256.0, 1024.0), (0.02, 0.021, 0.05, 0.3), 3e-7, 2e-8, 1e-7),
    StepLatencyModel.linear(0.0, 1e-3, 0.0),
]


@dataclass(frozen=True)
class Workload:
    arrivals: list[float]
    prompts: list[int]
    outputs: list[int]


@dataclass
class Replayed:
    first: list[float]
    finish: list[float]
    steps: int
    preemptions: int
    tokens: int


def replay(
    work: Workload, latency: StepLatencyModel, stages: int, blocks: int, block_tokens: int, limits: BatchLimits
) -> Replayed:
    """The worker's own scheduler in virtual time, a lane per stage."""
    count = len(work.arrivals)
    lanes = [BatchScheduler(limits, BlockPool(blocks, block_tokens, reuse=False)) for _ in range(stages)]
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
            scheduler.add(Sequence(str(r), [r] * work.prompts[r], SamplingParams(), max_output_tokens=work.outputs[r]))
        plan = scheduler.plan_step()
        context, pairs, ends = 0, 0.0, []
        for chunk in plan.chunks:
            context += chunk.start + chunk.count
            if chunk.sequence.pending == 1:
                ends.append(chunk.start + chunk.count)
            else:
                pairs += chunk.count * (chunk.start + 0.5 * (chunk.count + 1))
        gap = max(ends, default=0) * len(ends) - sum(ends)
        took = latency.step_s(StepLoad(plan.tokens, context, pairs, gap))
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
    *,
    quiet: bool = True,
) -> Replayed:
    count = len(work.arrivals)
    first, finish, counters = np.zeros(count), np.zeros(count), np.zeros(kernel.COUNTERS)
    kernel.simulate_replica(
        np.array(work.arrivals),
        np.array(work.prompts, np.int64),
        np.array(work.outputs, np.int64),
        stages,
        blocks,
        block_tokens,
        limits.max_running,
        limits.max_step_tokens,
        np.array(latency.knot_tokens),
        np.array(latency.knot_s),
        latency.context_token_s,
        latency.pair_s,
        latency.gap_s,
        quiet,
        np.full(count, np.inf),
        count,
        first,
        finish,
        counters,
    )
    steps, preemptions, tokens = (int(counters[i]) for i in (kernel.STEPS, kernel.PREEMPTIONS, kernel.TOKENS))
    return Replayed(first.tolist(), finish.tolist(), steps, preemptions, tokens)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(1, 14))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.003, 0.05, 0.4]), min_size=count, max_size=count))
    prompts = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    # by an irrational number: an arrival just when a step ends would make the last bit of a sum decide
    return Workload((np.cumsum(gaps) * np.pi / 3).tolist(), prompts, outputs)


@settings(deadline=None, max_examples=400)
@given(
    workloads(),
    st.sampled_from(LATENCIES),
    st.integers(1, 3),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 40),
    st.integers(1, 6),
    st.sampled_from([1, 7, 32, 512]),
)
def test_the_twin_takes_the_same_steps(
    work: Workload,
    latency: StepLatencyModel,
    stages: int,
    block_tokens: int,
    spare_blocks: int,
    max_running: int,
    max_step_tokens: int,
) -> None:
    needed = max(-(-(p + o) // block_tokens) for p, o in zip(work.prompts, work.outputs, strict=True))
    setting = (stages, needed + spare_blocks // block_tokens, block_tokens, BatchLimits(max_running, max_step_tokens))
    served, twin = replay(work, latency, *setting), compiled(work, latency, *setting)
    assert twin.first == pytest.approx(served.first, rel=1e-12)
    assert twin.finish == pytest.approx(served.finish, rel=1e-12)
    assert (twin.steps, twin.preemptions, twin.tokens) == (served.steps, served.preemptions, served.tokens)
    stepwise = compiled(work, latency, *setting, quiet=False)  # a jump over quiet steps changes nothing
    assert twin.finish == pytest.approx(stepwise.finish, rel=1e-12)


def test_the_cases_that_matter_are_reached() -> None:
    """Preemption, waiting for room, chunked prompts and quiet steps all happen in a workload that is small enough."""
    work = Workload([0.0, 0.0, 0.0, 0.1, 0.2], [30, 40, 50, 20, 100], [60, 50, 40, 30, 5])
    setting = (1, 11, 16, BatchLimits(4, 32))
    found = compiled(work, LATENCIES[1], *setting)
    assert found.preemptions > 0
    assert found.steps > 90
    assert found.finish == pytest.approx(compiled(work, LATENCIES[1], *setting, quiet=False).finish, rel=1e-12)
    served = replay(work, LATENCIES[1], *setting)
    assert found.finish == pytest.approx(served.finish, rel=1e-12)


@settings(deadline=None, max_examples=100)
@given(
    workloads(),
    st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=4),
    st.sampled_from([50.0, 80.0, 95.0, 100.0]),
    st.floats(0.2, 1.6),
)
def test_giving_up_early_loses_nothing(work: Workload, kind: list[int], percentile: float, share: float) -> None:
    """A simulation is given up only where its percentile would not be under the limit; else it is what numpy says of all."""
    kinds = [
        Replica(ReplicaShape(1, pp), LATENCIES[k], 512 * pp, EngineLimits(3, 32)) for k, pp in enumerate((1, 2, 1))
    ]
    whole = TierWorkload(np.array(work.arrivals), np.array(work.prompts), np.array(work.outputs))
    table, owners = KindTable(kinds), np.arange(len(whole)) % len(kind)
    served = serve_kinds(whole, table, np.array(kind), np.ones(3), Dispatch.ROUND_ROBIN)
    exact = float(np.percentile(served.finish_s - whole.arrival_s, percentile))
    alone = np.array([alone_latency(whole, one) for one in kinds])
    arrays = (whole.arrival_s, whole.input_tokens, whole.output_tokens, owners, np.array(kind))
    tables = (table.whole, table.rates, table.kx, table.ky, alone)
    assert kernel.percentile_within(*arrays, *tables, percentile, np.inf) == pytest.approx(exact, rel=1e-12)
    limit = exact * share
    found = kernel.percentile_within(*arrays, *tables, percentile, limit)
    assert found == pytest.approx(exact, rel=1e-12) or (found == np.inf and share < 1 + 1e-9)


def test_the_most_promising_pairs_are_those_of_a_full_enumeration() -> None:
    rng = np.random.default_rng(5)
    for _ in range(30):
        sizes = np.sort(rng.choice([1, 2, 3, 4, 6, 8], 4, replace=False))
        capacity, alone, rate = rng.uniform(0.5, 3, 4) * sizes, rng.uniform(1, 4, 4), float(rng.uniform(1, 30))
        gpus, most, keep = int(rng.integers(2, 30)), int(rng.integers(1, 20)), int(rng.integers(1, 9))
        every = [
            (kernel.estimate_s(n, m, capacity[i], capacity[j], alone[i], alone[j], rate, 20.0), (i, n, j, m))
            for i, j in itertools.combinations(range(4), 2)
            for n in range(1, min(most, gpus // sizes[i]) + 1)
            for m in [(gpus - n * sizes[i]) // sizes[j]]
            if m > 0 and gpus - n * sizes[i] - m * sizes[j] < sizes[i]
        ]
        every.sort(key=lambda one: one[0])
        found = kernel.promising_pairs(sizes, capacity, alone, rate, 20.0, gpus, most, keep)
        assert [tuple(row) for row in found.tolist()] == [parts for _, parts in every[:keep]]
