"""The QoE model of a replica whose step times are known, but not its batches. No I/O."""

import numpy as np

from penstock.planner_service.simulator import Replica, Workload
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.stages.qoe import BatchLoad

SHORTEST_TOKENS = 64
OF_A_BUCKET = (0.1, 0.3, 0.5, 0.7, 0.9)  # quantiles of its requests, by input per output token


def batches_of(replica: Replica, work: Workload) -> list[tuple[BatchLoad, float]]:
    """(load, cost in seconds) of batches that the replica holds: requests of the trace by exponential length buckets, in
    batches of 1, 2, 4, ... (section 4.1).

    The steady state of n like requests, a new one for each that ends: while one makes its O output tokens there are O decode
    steps of the batch, and one prompt of each of the n is computed. A step is as its latency model says, lengths being alike.
    """
    batches, low = list[tuple[BatchLoad, float]](), SHORTEST_TOKENS
    total, ratio = work.input_tokens + work.output_tokens, work.input_tokens / work.output_tokens
    while low <= work.longest_tokens:
        bucket = np.flatnonzero((total >= low) & (total < 2 * low))
        bucket = bucket[np.argsort(ratio[bucket], kind="stable")]
        for place in OF_A_BUCKET if len(bucket) else ():
            request = bucket[int(place * len(bucket))]
            inputs, outputs = int(work.input_tokens[request]), int(work.output_tokens[request])
            prompt = prompt_s(replica.latency, inputs, replica.limits.max_step_tokens)
            length, n = inputs + outputs / 2, 1
            while n <= replica.limits.max_running and n * (inputs + outputs) <= replica.lane_tokens:
                decode = replica.latency.step_s(StepLoad(n, round(n * length), requests=n))
                load = BatchLoad(n, n * inputs, n * inputs**2, n * length)
                batches.append((load, decode + n * prompt / outputs))
                n *= 2
        low *= 2
    return batches


def prompt_s(latency: StepLatencyModel, tokens: int, max_step_tokens: int) -> float:
    """Seconds to compute a prompt by itself, chunk by chunk."""
    total, done = 0.0, 0
    while done < tokens:
        chunk, starts = min(max_step_tokens, tokens - done), done == 0
        done += chunk
        pairs = chunk * (done - chunk + 0.5 * (chunk + 1))
        total += latency.step_s(StepLoad(chunk, done, pairs, requests=1, prompts=starts))
    return total
