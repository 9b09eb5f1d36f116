"""The QoE model of a replica whose step times are known, but not its batches. No I/O."""

from planner_service.simulator import Replica
from services.domain.latency import StepLatencyModel, StepLoad
from services.domain.stages import BatchLoad

INPUT_SHARES = (0.2, 0.5, 0.8)  # of a request's final length
SHORTEST_TOKENS, LEAST_RANGE = 64, 4096  # a fit needs some range of lengths


def batches_of(replica: Replica, max_tokens: int) -> list[tuple[BatchLoad, float]]:
    """(load, cost in seconds) of batches over exponential length buckets and sizes 1, 2, 4, ... that the replica holds.

    The steady state of n like requests, a new one for each that ends: while one makes its O output tokens there are O decode
    steps of the batch, and one prompt of each of the n is computed. A step is as its latency model says, lengths being alike.
    """
    found, low = list[tuple[BatchLoad, float]](), SHORTEST_TOKENS
    while low < max(max_tokens, LEAST_RANGE):
        n = 1
        while n <= replica.limits.max_running and n * 2 * low <= replica.lane_tokens:
            for share in INPUT_SHARES:
                inputs = max(1, round(1.5 * low * share))
                outputs = max(1, round(1.5 * low) - inputs)
                length = inputs + outputs / 2
                decode = replica.latency.step_s(StepLoad(n, round(n * length)))
                prompts = n * prompt_s(replica.latency, inputs, replica.limits.max_step_tokens)
                load = BatchLoad(n, n * inputs, n * inputs**2, n * length)
                found.append((load, decode + prompts / outputs))
            n *= 2
        low *= 2
    return found


def prompt_s(latency: StepLatencyModel, tokens: int, max_step_tokens: int) -> float:
    """Seconds to compute a prompt by itself, chunk by chunk."""
    total, done = 0.0, 0
    while done < tokens:
        chunk = min(max_step_tokens, tokens - done)
        done += chunk
        total += latency.step_s(StepLoad(chunk, done, chunk * (done - chunk + 0.5 * (chunk + 1))))
    return total
