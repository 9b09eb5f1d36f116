"""The scheduler that serves in virtual time, which simulations are held against."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.simulator import Workload
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.types.sampling import SamplingParams
from penstock.worker_service.scheduling.batching import BatchLimits, BatchScheduler
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.scheduling.sequence import Sequence
from penstock.worker_service.scheduling.steps import BatchPolicy

EARLY = 37  # tokens that a request which stops by itself leaves of those it may make


class KnowsPrefixes(BatchScheduler):
    """Requests, numbered by their ids, have the KV of their first tokens when they start, unless they were preempted.

    cached: tokens by request. All KV of a request is its own, as the pool shares none.
    """

    def __init__(
        self, limits: BatchLimits, pool: BlockPool, cached: Seq[int], policy: BatchPolicy | None = None
    ) -> None:
        super().__init__(limits, pool, policy)
        self._cached = cached

    def start(self, sequence: Sequence) -> bool:
        started = super().start(sequence)
        if started and sequence.preemptions == 0:
            sequence.computed = self._cached[int(sequence.request_id)]
        return started


@dataclass
class Replayed:
    """What came of N requests. cached: prompt tokens that each found in a cache."""

    first: list[float]
    finish: list[float]
    cached: list[int]
    steps: int = 0
    preemptions: int = 0
    tokens: int = 0


def replay(
    work: Workload,
    latency: StepLatencyModel,
    lanes: Seq[BatchScheduler],
    prompt_of: Callable[[int], list[int]] | None = None,
) -> Replayed:
    """The worker's own schedulers, one for each pipeline stage, which take the requests in turn.

    prompt_of: the token ids of a request's prompt; without it, no two requests share any.
    """
    count, stages = len(work), len(lanes)
    upcoming = [list(range(lane, count, stages)) for lane in range(stages)]
    ready = [0.0] * stages
    out = Replayed([0.0] * count, [0.0] * count, [0] * count)
    entry_free = last_exit = 0.0
    while True:
        able = []
        for i, lane in enumerate(lanes):
            if not lane.idle:
                able.append((ready[i], i))
            elif upcoming[i]:
                able.append((max(ready[i], float(work.arrival_s[upcoming[i][0]])), i))
        if not able:
            out.preemptions = sum(lane.preemptions for lane in lanes)
            return out
        at, i = min(able)
        start, scheduler = max(at, entry_free), lanes[i]
        while upcoming[i] and work.arrival_s[upcoming[i][0]] <= start:
            r = upcoming[i].pop(0)
            prompt = [r] * int(work.input_tokens[r]) if prompt_of is None else prompt_of(r)
            most = int(work.output_tokens[r]) + EARLY * (r % 2)
            scheduler.add(
                Sequence(str(r), prompt, SamplingParams(), max_output_tokens=most, priority=int(work.priority[r]))
            )
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
            out.cached[r] = sequence.cached_prompt_tokens
            if chunk.logits and sequence.output_tokens == 1:
                out.first[r] = end
            if sequence.output_tokens >= work.output_tokens[r]:
                out.finish[r] = end
                scheduler.finish(sequence.request_id)


def finish_on_instances(work: Workload, latency: StepLatencyModel, lanes: Seq[BatchScheduler]) -> list[float]:
    """When requests end that instances of one stage each take in turn. lanes: of the instances."""
    finish = np.zeros(len(work))
    for i, lane in enumerate(lanes):
        rows = np.arange(i, len(work), len(lanes))
        finish[rows] = replay(work.subset(rows), latency, [lane]).finish
    return [float(end_s) for end_s in finish]
