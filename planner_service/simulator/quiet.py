"""Quiet steps, compiled: all running requests decode, none ends or can start, so that nothing changes but contexts. No I/O.

A run of them is one jump of a simulation: its seconds have a closed form.
"""

import numpy as np

from penstock.planner_service.simulator.batch_step import (
    FREE,
    PREFILL_FIRST,
    RUNNING,
    WAITING,
    Batch,
    Engine,
    Requests,
    can_start,
)
from penstock.services.compilation import compiled


@compiled(allocates=False)
def quiet_steps(batch: Batch, requests: Requests, engine: Engine) -> tuple[int, int, int]:
    """(steps that may follow in which only contexts grow, total context of their first, how much longer its longest is).

    Quiet: all running requests decode, none ends, none waits that could start, and no block is missing.
    """
    counts, running = batch.counts, batch.rows[RUNNING]
    n = counts[RUNNING]
    if n == 0 or n > engine.max_step_tokens:
        return 0, 0, 0
    starts = n < engine.max_step_tokens or engine.policy == PREFILL_FIRST
    if counts[WAITING] > 0 and starts and can_start(batch.rows[WAITING, 0], counts, requests, engine):
        return 0, 0, 0
    shortest, context, longest = np.int64(1 << 60), 0, 0
    length, prompt, output, computed = requests.length, requests.prompt, requests.output, requests.computed
    for i in range(n):
        r = running[i]
        produced = length[r] - prompt[r]
        if length[r] - computed[r] != 1 or produced == 0:
            return 0, 0, 0
        shortest = min(shortest, output[r] - produced)
        context += computed[r] + 1
        longest = max(longest, computed[r] + 1)
    by_blocks = (counts[FREE] - n) * engine.block_tokens // n
    return max(0, min(shortest - 1, by_blocks)), context, longest * n - context


@compiled(allocates=False)
def quiet_s(start_s: float, next_s: float, most: int, gpu_s: float, requests: int, engine: Engine) -> tuple[int, float]:
    """(how many quiet steps follow each other from start_s on, `most` at most; the seconds they take).

    gpu_s: of the first. Each context is a token longer in the next. They end with the first that ends at next_s, when a
    request comes, or later. With several stages steps of lanes interleave: one.
    """
    cpu_s = engine.cpu_s + engine.cpu_request_s * requests
    more_s, least_s = engine.context_token_s * requests, 0.0
    if engine.overlapped:
        least_s = cpu_s
    else:
        gpu_s += cpu_s
    if engine.stages > 1:
        return 1, max(gpu_s, least_s)
    steps = most
    if next_s < np.inf and _run_s(most, gpu_s, more_s, least_s) > next_s - start_s:
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if _run_s(middle, gpu_s, more_s, least_s) >= next_s - start_s:
                high = middle
            else:
                low = middle + 1
        steps = low
    return steps, _run_s(steps, gpu_s, more_s, least_s)


@compiled(allocates=False)
def decodes_s(steps: int, gpu_s: float, engine: Engine) -> float:
    """Seconds of so many steps of a request alone; its first takes the GPU gpu_s."""
    cpu_s = engine.cpu_s + engine.cpu_request_s
    if engine.overlapped:
        return _run_s(steps, gpu_s, engine.context_token_s, cpu_s)
    return _run_s(steps, gpu_s + cpu_s, engine.context_token_s, 0.0)


@compiled(allocates=False)
def _run_s(steps: int, first_s: float, more_s: float, least_s: float) -> float:
    """Seconds of `steps` steps, of which step i takes first_s + i more_s, but no less than least_s.

    k steps take k first_s + more_s k (k - 1) / 2; those before the first that takes longer than least_s take that instead.
    """
    linear_s = steps * first_s + more_s * (0.5 * steps * (steps - 1))
    if first_s >= least_s:
        return linear_s
    short = steps
    if first_s + more_s * (steps - 1) > least_s:
        short = int(np.ceil((least_s - first_s) / more_s))
    return linear_s - (short * first_s + more_s * (0.5 * short * (short - 1))) + short * least_s
