"""The simulator's work done step by step in plain Python: an event loop over the worker's own BatchScheduler.

Two benchmarks need it: `simulator`, which replays a run with the step times that were measured, so that what the schedule
contributes to the error can be told from what the step times do; and `kernel`, where it represents simulators that are
built this way, as Vidur is (events in a heap; a batch formed, timed and ended at a time).
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from penstock.planner_service.simulator import Replica, Served, Workload
from penstock.planner_service.simulator.workload import Ints
from penstock.services.domain.latency import StepLoad
from penstock.types.sampling import SamplingParams
from penstock.worker_service.scheduling.batching import BatchLimits, BatchScheduler
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.scheduling.sequence import Sequence as Request
from penstock.worker_service.scheduling.steps import StepPlan

StepSeconds = Callable[[Replica, StepLoad], float]


def replay(
    work: Workload, replicas: Sequence[Replica], owner: Ints, step_s: StepSeconds
) -> tuple[Served, list[StepLoad]]:
    """Serve `work`, request r on replica owner[r]; what was felt, and the load of each step in order of its start.

    step_s is asked once for each step, in that order. ValueError for pipelines.
    """
    if any(replica.shape.pp > 1 for replica in replicas):
        raise ValueError("replicas of one stage only")
    schedulers = [
        BatchScheduler(
            BatchLimits(replica_shape.limits.max_running, replica_shape.limits.max_step_tokens),
            BlockPool(replica_shape.lane_blocks, replica_shape.limits.block_tokens, reuse=False),
        )
        for replica_shape in replicas
    ]
    first, finish = np.zeros(len(work)), np.zeros(len(work))
    sampling, loads = SamplingParams(), list[StepLoad]()
    under_way: list[StepPlan | None] = [None] * len(replicas)
    # (time, number, replica, request that arrives or -1 where a step ends)
    events = [(at, r, int(owner[r]), r) for r, at in enumerate(work.arrival_s.tolist())]
    number, busy_s = len(events), 0.0
    while events:
        now = events[0][0]
        touched = set()
        while events and events[0][0] == now:
            _, _, replica, r = heapq.heappop(events)
            touched.add(replica)
            scheduler = schedulers[replica]
            if r >= 0:
                prompt = [r] * int(work.input_tokens[r])
                scheduler.add(Request(str(r), prompt, sampling, max_output_tokens=int(work.output_tokens[r])))
                continue
            plan, under_way[replica] = under_way[replica], None
            assert plan is not None
            scheduler.commit(plan, {chunk.sequence.request_id: [0] for chunk in plan.chunks if chunk.logits})
            for chunk in plan.chunks:
                sequence, r = chunk.sequence, int(chunk.sequence.request_id)
                if chunk.logits and sequence.output_tokens == 1:
                    first[r] = now
                if sequence.output_tokens >= sequence.max_output_tokens:
                    finish[r] = now
                    scheduler.finish(sequence.request_id)
        for replica in sorted(touched):
            if under_way[replica] is None and not schedulers[replica].idle:
                plan = under_way[replica] = schedulers[replica].plan_step()
                loads.append(load_of(plan))
                step_time_s = step_s(replicas[replica], loads[-1])
                busy_s += step_time_s
                heapq.heappush(events, (now + step_time_s, number, replica, -1))
                number += 1
    span = float(finish.max() - work.arrival_s[0])
    preemptions = sum(scheduler.preemptions for scheduler in schedulers)
    return Served(first, finish, owner, busy_s / (span * len(replicas)), len(loads), preemptions), loads


def load_of(plan: StepPlan) -> StepLoad:
    """What a planned step computes, as the latency model counts it."""
    context, pairs, ends = 0, 0.0, []
    for chunk in plan.chunks:
        end = chunk.start + chunk.count
        context += end
        if chunk.sequence.pending == 1:
            ends.append(end)
        else:
            pairs += chunk.count * (chunk.start + 0.5 * (chunk.count + 1))
    gap, starts = max(ends, default=0) * len(ends) - sum(ends), sum(chunk.start == 0 for chunk in plan.chunks)
    return StepLoad(plan.tokens, context, pairs, gap, requests=len(plan.chunks), prompts=starts)
