"""A latency model of an engine's own steps, measured at its start."""

import contextlib
import time
from collections.abc import Callable

import numpy as np

from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.profile import Bounds, timed_steps

CALIBRATION_S, MEASURING_S = 3.0, 15.0
"""Enough for some hundred steps of a small model; what it misses, the online correction makes good."""
MIN_STEPS, MIN_SIZES = 20, 8


def measured_latency(
    core: EngineCore,
    *,
    seconds: float = CALIBRATION_S,
    most_s: float = MEASURING_S,
    now: Callable[[], float] = time.perf_counter,
) -> StepLatencyModel:
    """Step an idle core through batches of many sizes, for `seconds` and until there are enough; fit a model to the times.

    most_s: the most that it takes, about: of a slow model only small batches are measured.
    """
    began, samples, sizes = now(), list[tuple[StepLoad, float]](), set[int]()
    bounds = Bounds.within(core, most_s, now)
    with contextlib.closing(timed_steps(core, now=now, bounds=bounds)) as steps:  # type: ignore[type-var]
        for sample in steps:
            samples.append(sample)
            sizes.add(sample[0].tokens)
            elapsed = now() - began
            if elapsed > most_s or (elapsed > seconds and len(samples) >= MIN_STEPS and len(sizes) >= MIN_SIZES):
                break
    core.restart_throughput()
    return fitted(samples)


def fitted(samples: list[tuple[StepLoad, float]]) -> StepLatencyModel:
    """T = overhead + a * tokens + b * context + c * pairs by least squares of the relative error, no term negative.

    A term whose best value is negative is left out, the worst first; overhead and tokens stay, at no less than 0.
    """
    terms = np.array([(1.0, load.tokens, load.context_tokens, load.pairs) for load, _ in samples])
    times = np.array([seconds for _, seconds in samples])
    weights = 1.0 / np.maximum(times, 1e-9)
    columns = [0, 1, 2, 3]
    while True:
        solution, *_ = np.linalg.lstsq(terms[:, columns] * weights[:, None], times * weights)
        if len(columns) == 1 or solution.min() >= 0:
            break
        del columns[int(np.argmin(solution))]
    values = dict(zip(columns, np.maximum(solution, 0.0).tolist(), strict=True))
    overhead_s, token_s = values.get(0, 0.0), values.get(1, 0.0)
    return StepLatencyModel((0.0, 1.0), (overhead_s, overhead_s + token_s), values.get(2, 0.0), values.get(3, 0.0))
