"""Quiet steps, compiled: all running requests decode, none ends or can start, so that nothing changes but contexts. No I/O.

A run of them is one jump of a simulation: its seconds have a closed form.
"""

import numpy as np

from penstock.planner_service.simulator.batch_step import Engine
from penstock.services.compilation import compiled


@compiled(allocates=False)
def quiet_s(start_s: float, next_s: float, most: int, gpu_s: float, requests: int, engine: Engine) -> tuple[int, float]:
    """(how many quiet steps follow each other from start_s on, `most` at most; the seconds they take).

    gpu_s: of the first. Each context is a token longer in the next. They end with the first that ends at next_s, when a
    request comes, or later. With several stages steps of lanes interleave: one.
    """
    first_s, least_s = _step_s(gpu_s, requests, engine)
    more_s = engine.context_token_s * requests
    if engine.stages > 1:
        return 1, max(first_s, least_s)
    steps = most
    if next_s < np.inf and _run_s(most, first_s, more_s, least_s) > next_s - start_s:
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if _run_s(middle, first_s, more_s, least_s) >= next_s - start_s:
                high = middle
            else:
                low = middle + 1
        steps = low
    return steps, _run_s(steps, first_s, more_s, least_s)


@compiled(allocates=False)
def decodes_s(steps: int, gpu_s: float, engine: Engine) -> float:
    """Seconds of so many steps of a request alone; its first takes the GPU gpu_s."""
    first_s, least_s = _step_s(gpu_s, 1, engine)
    return _run_s(steps, first_s, engine.context_token_s, least_s)


@compiled(allocates=False)
def _step_s(gpu_s: float, requests: int, engine: Engine) -> tuple[float, float]:
    """(seconds of a step, seconds that each takes at least), see EngineCpu.step_with."""
    cpu_s = engine.cpu_s + engine.cpu_request_s * requests
    return (gpu_s, cpu_s) if engine.overlapped else (gpu_s + cpu_s, 0.0)


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
