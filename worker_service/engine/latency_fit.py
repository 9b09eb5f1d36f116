"""A latency model of an engine's own steps, measured at its start."""

import contextlib
import time
from collections.abc import Callable, Iterator

from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.profile import Batch, Bounds, timed_batches, timed_steps

CALIBRATION_S, MEASURING_S = 3.0, 15.0
"""Enough for some hundred steps of a small model; what it misses, the online correction makes good."""
MIN_STEPS, MIN_SIZES = 20, 8
GROWTH_SHARE = 0.8
"""Of the time at most, for batches of ascending sizes: of a slow model they show how a step grows with its tokens, which is
anything but a straight line on a CPU (1.5B, 4 bits: 1, 4, 8, 16, 64 tokens take .13, .3, .7, 1.2, 2.9 s)."""
SMALL_BATCHES, LONG_PROMPTS = (1, 2, 4, 8, 16), (32, 64, 128, 256, 512)


def measured_latency(
    core: EngineCore,
    *,
    seconds: float = CALIBRATION_S,
    most_s: float = MEASURING_S,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[StepLatencyModel, list[tuple[StepLoad, float]]]:
    """Step an idle core through batches of many sizes, for `seconds` and until there are enough; fit a model to the times.

    most_s: the most that it takes, about: of a slow model only small batches are measured. The steps are returned, too.
    """
    # With SciPy, 50 MB: most workers promise nothing, and need none of it.
    from penstock.services.domain.latency_fit import fit_latency

    began = now()
    samples = list(_growing(core, GROWTH_SHARE * most_s, now))
    sizes = {load.tokens for load, _ in samples}
    bounds = Bounds.within(core, max(0.0, most_s - (now() - began)), now)
    with contextlib.closing(timed_steps(core, now=now, bounds=bounds)) as steps:  # type: ignore[type-var]
        for sample in steps:
            samples.append(sample)
            sizes.add(sample[0].tokens)
            elapsed = now() - began
            if elapsed > most_s or (elapsed > seconds and len(samples) >= MIN_STEPS and len(sizes) >= MIN_SIZES):
                break
    core.restart_throughput()
    return fit_latency(samples)[0], samples


def _growing(core: EngineCore, most_s: float, now: Callable[[], float]) -> Iterator[tuple[StepLoad, float]]:
    """Steps of more and more tokens while they fit in about `most_s`: of replies, each token of which is drawn, then of
    prompts."""
    limits, began, last_s = core.limits, now(), 0.0
    batches = [Batch(count, 2) for count in SMALL_BATCHES if count <= limits.batch.max_running]
    batches += [Batch(1, tokens) for tokens in LONG_PROMPTS if tokens <= limits.batch.max_step_tokens]
    for batch in batches:
        if batch.context_tokens + 4 > limits.max_context_tokens or now() - began + 1.5 * last_s > most_s:
            return
        batch_began = now()
        yield from timed_batches(core, [batch], 0, now=now)
        last_s = now() - batch_began
