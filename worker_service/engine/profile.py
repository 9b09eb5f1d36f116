"""Measures the step times of an engine over batch sizes, context lengths and prompt chunks.

Runs an `EngineCore` like a worker: adds requests, times steps, and derives the load of each step from the rows of its runner.
"""

import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.services.domain.latency import StepLoad
from penstock.types.prompts import TokenPrompt
from penstock.types.replies import FinishReason
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.runner import ModelRunner, Row, RowResult

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BETWEEN = (3, 5, 6, 12, 24, 48, 96, 192)  # at one context only: matrix products have jumps between powers of two
CONTEXTS = (16, 64, 256, 1024, 4096)
DECODES = 32  # steps measured per batch: caches are cold for the first few after a prompt, and replies are long
MIN_DECODES = 4
MAX_PROMPT_TOKENS = 16_384  # in one batch; bounds the time
PROBE_TOKENS = 16
MEASURE_S = 200.0


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
class Bounds:
    """What is measured of a slow model: batches of up to `tokens` prompt tokens, and `decodes` steps of each."""

    tokens: float = MAX_PROMPT_TOKENS
    decodes: int = DECODES

    @classmethod
    def within(cls, core: EngineCore, seconds: float, now: Callable[[], float]) -> "Bounds":
        """Such that a batch takes an eighth of the time at most, by a prompt and some decodes of the idle core."""
        sampling = SamplingParams(temperature=0.0, max_tokens=PROBE_TOKENS // 4, ignore_eos=True)
        prompt = [0] * min(PROBE_TOKENS, core.limits.max_context_tokens - PROBE_TOKENS // 4 - 1)
        core.add(GenerationRequest("probe", TokenPrompt(tuple(prompt)), sampling), prompt)
        began = now()
        core.step()
        token_s, began = max(1e-9, (now() - began) / len(prompt)), now()
        while not core.idle:
            core.step()
        step_s = max(1e-9, (now() - began) / (PROBE_TOKENS // 4 - 1))
        return cls(seconds / 8 / token_s, max(MIN_DECODES, min(DECODES, int(seconds / 16 / step_s))))


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests in one batch. In a mixed batch, every other one has an eighth of the context."""

    count: int
    context_tokens: int
    mixed: bool = False

    @property
    def prompt_tokens(self) -> list[int]:
        """Of each request."""
        lengths = [self.context_tokens // 8 if self.mixed and i % 2 else self.context_tokens for i in range(self.count)]
        return [max(2, length) for length in lengths]


EVERY_BATCH = tuple(
    Batch(n, length, mixed)
    for length in CONTEXTS
    for n in BATCHES
    for mixed in ((False, True) if n > 1 and length > CONTEXTS[0] else (False,))
)


def _batches(core: EngineCore, bounds: Bounds) -> list[Batch]:
    """The batches that fit into the core and the bounds; the smallest one in any case."""
    limits, pool = core.limits, core.scheduler.pool
    room = pool.count * pool.block_tokens
    return [
        b
        for b in (*(Batch(n, CONTEXTS[1]) for n in BETWEEN), *EVERY_BATCH)
        if b.count <= limits.batch.max_running
        and (b.count * b.context_tokens <= bounds.tokens or (b.count, b.context_tokens) == (1, CONTEXTS[0]))
        and b.context_tokens + DECODES + 2 <= limits.max_context_tokens
        and b.count * (b.context_tokens + DECODES + 16) <= min(room, max(MAX_PROMPT_TOKENS, b.context_tokens + 32))
    ]


def timed_steps(
    core: EngineCore,
    *,
    seed: int = 0,
    now: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[int, int], None] | None = None,
    bounds: Bounds | None = None,
) -> Iterator[tuple[StepLoad, float]]:
    """Run every batch size and context length that fits, in an order drawn by `seed`; yield loads and seconds.

    The core must be idle, and is idle again when the iterator ends or is closed. now: the clock for timing.
    """
    bounds = bounds or Bounds()
    batches = _batches(core, bounds)
    random.Random(seed).shuffle(batches)
    return timed_batches(core, batches, bounds.decodes, seed=seed, now=now, on_progress=on_progress)


def timed_batches(
    core: EngineCore,
    batches: Sequence[Batch],
    decodes: int,
    *,
    seed: int = 0,
    now: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[StepLoad, float]]:
    """Run these batches, as `timed_steps`. decodes: steps after the prompts of each, and one more."""
    rng, vocab = random.Random(seed), core.tokenizer.vocab_size
    watched = _WatchedRunner(core.runner)
    sampling = SamplingParams(temperature=0.0, max_tokens=decodes + 2, ignore_eos=True)
    names: list[str] = []
    core.runner = watched
    try:
        for done, batch in enumerate(batches):
            if on_progress is not None:
                on_progress(done, len(batches))
            names = [f"profile-{i}" for i in range(batch.count)]
            for name, count in zip(names, batch.prompt_tokens, strict=True):
                prompt = [rng.randrange(vocab) for _ in range(count)]
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
    """Measure steps of every batch size and context length that fits, for MEASURE_S at most. See timed_steps."""
    seconds_by_load: dict[StepLoad, list[float]] = defaultdict(list)
    bounds, began = Bounds.within(core, MEASURE_S, time.perf_counter), time.perf_counter()
    with contextlib.closing(timed_steps(core, seed=seed, on_progress=on_progress, bounds=bounds)) as steps:  # type: ignore[type-var]
        for load, seconds in steps:
            seconds_by_load[load].append(seconds)
            if time.perf_counter() - began > MEASURE_S:
                break
    return [StepSample(load, median(seconds)) for load, seconds in seconds_by_load.items()]
