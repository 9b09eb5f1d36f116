"""Measures how long an engine's steps take, over batch sizes, context lengths and prompt chunks.

Runs an `EngineCore` by itself, as its worker would: requests are added, steps are taken and timed, and what each computed is
read off the rows that its runner was given.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from services.domain.latency import StepLoad
from services.domain.requests import FinishReason, GenerationRequest, SamplingParams, TokenPrompt
from worker_service.engine.core import EngineCore
from worker_service.engine.runner import ModelRunner, Row, RowResult

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (16, 64, 256, 1024, 4096)
DECODES = 6  # steps measured for each batch
MAX_PROMPT_TOKENS = 16_384  # in one batch: bounds the time


@dataclass(frozen=True, slots=True)
class StepSample:
    """What a step computed, and the median seconds that such steps took."""

    load: StepLoad
    seconds: float


class _WatchedRunner:
    """A runner that remembers the load of its last step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.last = runner, StepLoad(0, 0)
        self.kv_layout = runner.kv_layout
        self.read_blocks, self.write_blocks = runner.read_blocks, runner.write_blocks

    def run(self, rows: Sequence[Row]) -> list[RowResult]:
        self.last = load_of(rows)
        return self._runner.run(rows)


def load_of(rows: Sequence[Row]) -> StepLoad:
    """The load of a step as the latency model counts it."""
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


def measure(
    core: EngineCore, *, seed: int = 0, on_progress: Callable[[int, int], None] | None = None
) -> list[StepSample]:
    """Time steps of every batch size and context length that fits; tens of seconds on a CPU.

    The core must be idle, and is idle again afterwards. Half of the batches mix short and long contexts.
    """
    rng, vocab = random.Random(seed), core.tokenizer.vocab_size
    watched = _WatchedRunner(core.runner)
    core.runner = watched
    found: dict[StepLoad, list[float]] = defaultdict(list)
    most_running = core.limits.batch.max_running
    room = core.scheduler.pool.count * core.scheduler.pool.block_tokens
    plans = [
        (n, length, mixed)
        for length in CONTEXTS
        for n in BATCHES
        for mixed in ((False, True) if n > 1 and length > CONTEXTS[0] else (False,))
        if n <= most_running
        and length + DECODES + 2 <= core.limits.max_context_tokens
        and n * (length + DECODES + 16) <= min(room, max(MAX_PROMPT_TOKENS, length + 32))
    ]
    sampling = SamplingParams(temperature=0.0, max_output_tokens=DECODES + 2, ignore_eos=True)
    try:
        for done, (n, length, mixed) in enumerate(plans):
            if on_progress is not None:
                on_progress(done, len(plans))
            names = [f"profile-{i}" for i in range(n)]
            for i, name in enumerate(names):
                count = length // 8 if mixed and i % 2 else length
                prompt = [rng.randrange(vocab) for _ in range(max(2, count))]
                core.add(GenerationRequest(name, TokenPrompt(tuple(prompt)), sampling), prompt)
            while not core.idle:
                began = time.perf_counter()
                core.step()
                found[watched.last].append(time.perf_counter() - began)
            for name in names:
                core.abort(name, FinishReason.ABORTED)
        if on_progress is not None:
            on_progress(len(plans), len(plans))
    finally:
        core.runner = watched._runner
    return [StepSample(load, median(seconds)) for load, seconds in found.items()]
