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

from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.types.prompts import TokenPrompt
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
PROBE_TOKENS, PROBE_DECODES = 16, 3
MEASURE_S = 200.0
CALIBRATION_S, MEASURING_S = 3.0, 15.0
"""Enough for some hundred steps of a small model; what it misses, the online correction makes good."""
MIN_STEPS, MIN_SIZES = 20, 8
GROWTH_SHARE = 0.8
"""Of the time at most, for batches of ascending sizes: of a slow model they show how a step grows with its tokens, which is
anything but a straight line on a CPU (1.5B, 4 bits: 1, 4, 8, 16, 64 tokens take .13, .3, .7, 1.2, 2.9 s)."""
SMALL_BATCHES, LONG_PROMPTS = (1, 2, 4, 8, 16), (32, 64, 128, 256, 512)


StepSample = tuple[StepLoad, float]
"""The load of a step, and its seconds."""
OnProgress = Callable[[int, int], None]
"""Told how many of how many batches are measured."""


class _WatchedRunner:
    """A runner that records the load of its last step."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.last = runner, StepLoad(0, 0)
        self.kv_layout = runner.kv_layout
        self.read_blocks, self.write_blocks = runner.read_blocks, runner.write_blocks

    def run(self, rows: Sequence[Row]) -> list[RowResult]:
        self.last = load_of(rows)
        return self.runner.run(rows)


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


def add_request(core: EngineCore, name: str, prompt: list[int], output_tokens: int) -> None:
    """Add a request whose reply has exactly so many tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    core.add(GenerationRequest(name, TokenPrompt(tuple(prompt)), sampling), prompt)


def probe(
    core: EngineCore, tokens: int, decodes: int, *, token: int = 0, now: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Compute a prompt of so many tokens and some decodes of the idle core; the seconds of a token of the prompt, and of a
    decode. token: of which the prompt consists: KV of the same one is reused."""
    add_request(core, "probe", [token] * tokens, decodes + 1)
    began = now()
    core.step()
    token_s, began = max(1e-9, (now() - began) / tokens), now()
    while not core.idle:
        core.step()
    return token_s, max(1e-9, (now() - began) / decodes)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is measured of a slow model: batches of up to `tokens` prompt tokens, and `decodes` steps of each."""

    tokens: float = MAX_PROMPT_TOKENS
    decodes: int = DECODES

    @classmethod
    def within(cls, core: EngineCore, seconds: float, now: Callable[[], float]) -> "Bounds":
        """Such that a batch takes an eighth of the time at most, by a prompt and some decodes of the idle core."""
        tokens = min(PROBE_TOKENS, core.limits.max_context_tokens - PROBE_DECODES - 2)
        token_s, step_s = probe(core, tokens, PROBE_DECODES, now=now)
        return cls(seconds / 8 / token_s, max(MIN_DECODES, min(DECODES, int(seconds / 16 / step_s))))


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests in one batch. In a mixed batch, every other one has an eighth of the context."""

    count: int
    context_tokens: int
    mixed: bool = False

    def fits(self, running: int, context_tokens: int, kv_tokens: int, page_tokens: int, decodes: int) -> bool:
        """Whether an engine with these limits can compute it with so many decodes, in reasonable time."""
        longest, room = self.context_tokens + decodes, max(MAX_PROMPT_TOKENS, self.context_tokens + 32)
        within = self.count <= running and longest + 2 <= context_tokens
        return within and self.count * (longest + page_tokens) <= min(kv_tokens, room)

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
        if b.fits(limits.batch.max_running, limits.max_context_tokens, room, 16, DECODES)
        and (b.count * b.context_tokens <= bounds.tokens or (b.count, b.context_tokens) == (1, CONTEXTS[0]))
    ]


def timed_steps(
    core: EngineCore,
    *,
    seed: int = 0,
    now: Callable[[], float] = time.perf_counter,
    on_progress: OnProgress = lambda _, __: None,
    bounds: Bounds | None = None,
) -> Iterator[StepSample]:
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
    on_progress: OnProgress = lambda _, __: None,
) -> Iterator[StepSample]:
    """Run these batches, as `timed_steps`. decodes: steps after the prompts of each, and one more."""
    rng, vocab = random.Random(seed), core.tokenizer.vocab_size
    watched = _WatchedRunner(core.runner)
    names: list[str] = []
    core.rows.runner = watched
    try:
        for done, batch in enumerate(batches):
            on_progress(done, len(batches))
            names = [f"profile-{i}" for i in range(batch.count)]
            for name, count in zip(names, batch.prompt_tokens, strict=True):
                add_request(core, name, [rng.randrange(vocab) for _ in range(count)], decodes + 2)
            while not core.idle:
                began = now()
                core.step()
                yield watched.last, now() - began
        on_progress(len(batches), len(batches))
    finally:
        for name in names:
            core.abort(name)
        core.rows.runner = watched.runner


def measure(core: EngineCore, *, seed: int = 0, on_progress: OnProgress = lambda _, __: None) -> list[StepSample]:
    """Measure steps of every batch size and context length that fits, for MEASURE_S at most: medians. See timed_steps."""
    seconds_by_load: dict[StepLoad, list[float]] = defaultdict(list)
    bounds, began = Bounds.within(core, MEASURE_S, time.perf_counter), time.perf_counter()
    with contextlib.closing(timed_steps(core, seed=seed, on_progress=on_progress, bounds=bounds)) as steps:  # type: ignore[type-var]
        for load, seconds in steps:
            seconds_by_load[load].append(seconds)
            if time.perf_counter() - began > MEASURE_S:
                break
    return [(load, median(seconds)) for load, seconds in seconds_by_load.items()]


def measured_latency(
    core: EngineCore,
    *,
    seconds: float = CALIBRATION_S,
    most_s: float = MEASURING_S,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[StepLatencyModel, list[StepSample]]:
    """Step an idle core through batches of many sizes, for `seconds` and until there are enough; fit a model to the times.

    most_s: the most that it takes, about: of a slow model only small batches are measured. The steps are returned, too.
    """
    # With SciPy, 50 MB: most workers promise nothing, and need none of it.
    from penstock.services.domain.latency_fit import fit_latency

    began = now()
    samples = list(_growing(core, GROWTH_SHARE * most_s, now))
    bounds = Bounds.within(core, max(0.0, most_s - (now() - began)), now)
    with contextlib.closing(timed_steps(core, now=now, bounds=bounds)) as steps:  # type: ignore[type-var]
        for sample in steps:
            samples.append(sample)
            elapsed, sizes = now() - began, {load.tokens for load, _ in samples}
            if elapsed > most_s or (elapsed > seconds and len(samples) >= MIN_STEPS and len(sizes) >= MIN_SIZES):
                break
    core.restart_throughput()
    return fit_latency(samples)[0], samples


def _growing(core: EngineCore, most_s: float, now: Callable[[], float]) -> Iterator[StepSample]:
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
