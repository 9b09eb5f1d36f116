"""Measures the step times of an engine over batch sizes, context lengths and prompt chunks.

Runs an `EngineCore` like a worker: adds requests, times steps, and derives the load of each step from the rows of its runner.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from services.domain.latency import StepLoad
from services.domain.requests import FinishReason, GenerationRequest, SamplingParams, TokenPrompt
from worker_service.engine.core import EngineCore
from worker_service.engine.runner import ModelRunner, Row, RowResult

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BETWEEN = (3, 5, 6, 12, 24, 48, 96, 192)  # at one context only: matrix products have jumps between powers of two
CONTEXTS = (16, 64, 256, 1024, 4096)
DECODES = 32  # steps measured per batch: caches are cold for the first few after a prompt, and replies are long
MAX_PROMPT_TOKENS = 16_384  # in one batch; bounds the time


@dataclass(frozen=True, slots=True)
class StepSample:
    """The load of a step, and the median duration of steps with this load."""

    load: StepLoad
    seconds: float


class _WatchedRunner:
    """A runner that records the load of its last step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.last = runner, StepLoad(0, 0)
        self.kv_layout = runner.kv_layout
        self.read_blocks, self.write_blocks = runner.read_blocks, runner.write_blocks

    def run(self, rows: Sequence[Row]) -> list[RowResult]:
        self.last = load_of(rows)
        return self._runner.run(rows)


def load_of(rows: Sequence[Row]) -> StepLoad:
    """The load of a step in terms of the latency model."""
    tokens = context = 0
    pairs, ends = 0.0, []
    for row in rows:
        count, end = len(row.tokens), row.start + len(row.tokens)
        tokens, context = tokens + count, context + end
        if count == 1 and row.start > 0:
            ends.append(end)
        else:
            pairs += count * (row.start + 0.5 * (count + 1))
    return StepLoad(tokens, context, pairs, max(ends, default=0) * len(ends) - sum(ends))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests in one batch. In a mixed batch, every other one has an eighth of the context."""

    count: int
    context_tokens: int
    mixed: bool


def _batches(core: EngineCore) -> list[_Batch]:
    """The batches that fit into the core."""
    limits, pool = core.limits, core.scheduler.pool
    room = pool.count * pool.block_tokens
    sizes = [_Batch(n, CONTEXTS[1], False) for n in BETWEEN]
    for length in CONTEXTS:
        for n in BATCHES:
            sizes += [
                _Batch(n, length, mixed) for mixed in (False, True) if not mixed or (n > 1 and length > CONTEXTS[0])
            ]
    return [
        b
        for b in sizes
        if b.count <= limits.batch.max_running
        and b.context_tokens + DECODES + 2 <= limits.max_context_tokens
        and b.count * (b.context_tokens + DECODES + 16) <= min(room, max(MAX_PROMPT_TOKENS, b.context_tokens + 32))
    ]


def timed_steps(
    core: EngineCore,
    *,
    seed: int = 0,
    now: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[StepLoad, float]]:
    """Run every batch size and context length that fits, in an order drawn by `seed`; yield loads and seconds.

    The core must be idle, and is idle again when the iterator ends or is closed. now: the clock for timing.
    """
    rng, vocab = random.Random(seed), core.tokenizer.vocab_size
    batches = _batches(core)
    rng.shuffle(batches)
    watched = _WatchedRunner(core.runner)
    sampling = SamplingParams(temperature=0.0, max_output_tokens=DECODES + 2, ignore_eos=True)
    names: list[str] = []
    core.runner = watched
    try:
        for done, batch in enumerate(batches):
            if on_progress is not None:
                on_progress(done, len(batches))
            names = [f"profile-{i}" for i in range(batch.count)]
            for i, name in enumerate(names):
                count = batch.context_tokens // 8 if batch.mixed and i % 2 else batch.context_tokens
                prompt = [rng.randrange(vocab) for _ in range(max(2, count))]
                core.add(GenerationRequest(name, TokenPrompt(tuple(prompt)), sampling), prompt)
            while not core.idle:
                began = now()
                core.step()
                yield watched.last, now() - began
        if on_progress is not None:
            on_progress(len(batches), len(batches))
    finally:
        for name in names:
            core.abort(name, FinishReason.ABORTED)
        core.runner = watched._runner


def measure(
    core: EngineCore, *, seed: int = 0, on_progress: Callable[[int, int], None] | None = None
) -> list[StepSample]:
    """Measure steps of every batch size and context length that fits; takes tens of seconds on a CPU. See timed_steps."""
    seconds_by_load: dict[StepLoad, list[float]] = defaultdict(list)
    for load, seconds in timed_steps(core, seed=seed, on_progress=on_progress):
        seconds_by_load[load].append(seconds)
    return [StepSample(load, median(seconds)) for load, seconds in seconds_by_load.items()]
